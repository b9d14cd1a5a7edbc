package compile

// Conflicts are for the test that compares them with the documentation.
var Conflicts = conflicts
