// This file lets functions without a body be compiled.
