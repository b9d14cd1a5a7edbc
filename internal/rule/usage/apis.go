package usage

// apis are what the usual APIs say that a request has used, in the words of actual_cost json.
// Of several that a body could be of, the first counts, so those with a total come before
// those whose parts are added.
var apis = []struct {
	name, says string
	repeats    bool // whether a stream of it may be an array, whose elements repeat the number so far
}{
	// Whole responses and the last event of a stream, and what is compatible with them: Azure,
	// DeepSeek, Groq, Mistral, OpenRouter, vLLM, llama.cpp's /v1. Streams have it in the event that
	// completes a response of the Responses API.
	{"OpenAI", "usage.total_tokens|response.usage.total_tokens|x_groq.usage.total_tokens", false},

	// Each event has the number so far. Thoughts are in it.
	{"Gemini", "usageMetadata.totalTokenCount|response.usageMetadata.totalTokenCount", true},

	{"Bedrock Converse", "usage.totalTokens", false},

	// The number of tokens in is told as a stream begins, and the number out so far as it ends,
	// with those in or null in their place. What is read from a cache or written to it is not
	// among those in, and counts like them.
	{"Anthropic", "usage.input_tokens|message.usage.input_tokens usage.output_tokens|message.usage.output_tokens " +
		"usage.cache_creation_input_tokens|message.usage.cache_creation_input_tokens usage.cache_read_input_tokens|message.usage.cache_read_input_tokens", false},

	{"Cohere", "usage.tokens.input_tokens|delta.usage.tokens.input_tokens|meta.tokens.input_tokens " +
		"usage.tokens.output_tokens|delta.usage.tokens.output_tokens|meta.tokens.output_tokens", false},

	// Its embeddings have only this.
	{"Cohere, as it is billed", "usage.billed_units.input_tokens|delta.usage.billed_units.input_tokens|meta.billed_units.input_tokens " +
		"usage.billed_units.output_tokens|delta.usage.billed_units.output_tokens|meta.billed_units.output_tokens", false},

	// The last line of a stream has it.
	{"Ollama", "prompt_eval_count eval_count", false},

	// Several prompts have an array of results.
	{"llama.cpp", "tokens_evaluated tokens_predicted", false},
}

// lastTexts are names at the top of the last text of a stream, and their values there. Clients
// need not wait for the end of the stream behind it, and most do not. Gemini has none.
var lastTexts = map[string][]string{
	"type": {
		"response.completed", "response.incomplete", "response.failed", // OpenAI's Responses API
		"image_generation.completed", "image_edit.completed", "speech.audio.done", "transcript.text.done",
		"message_stop", // Anthropic
		"message-end",  // Cohere
	},
	"done": {"true"}, // Ollama
	"stop": {"true"}, // llama.cpp
}

// doneData are the data of the last event of a stream of OpenAI and of what is compatible with it.
const doneData = "[DONE]"

// inNames are parts of all their names that are rare in other text, by their first letter too.
var inNames = []string{"ken", "_count"}
