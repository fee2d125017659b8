// OpenAI's JavaScript client and the AI SDK against a server: text, streams, forms, tools. Prints one JSON object.
//
//     node js_clients.cjs http://127.0.0.1:8000 MODEL FOLDER    # FOLDER: with their node_modules
const { createRequire } = require("node:module");
const [url, model, folder] = process.argv.slice(2);
const load = createRequire(folder + "/");
const OpenAI = load("openai");
const { generateText, streamText, jsonSchema, tool, Output } = load("ai");
const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");

const baseURL = url + "/v1";
const messages = [{ role: "user", content: "hi" }];
const size = {
  type: "object", properties: { size: { enum: ["s", "l"] } }, required: ["size"], additionalProperties: false,
};
const order = { type: "function", function: { name: "order", parameters: size } };

async function openai() {
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const common = { model, messages, max_tokens: 8, temperature: 0 };
  const whole = await client.chat.completions.create(common);
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...common, stream: true }))
    streamed += chunk.choices[0]?.delta?.content ?? "";
  const form = { type: "json_schema", json_schema: { name: "size", schema: size } };
  const shaped = await client.chat.completions.parse({ ...common, max_tokens: 64, response_format: form });
  const called = await client.chat.completions.create({ ...common, max_tokens: 128, tools: [order], tool_choice: "required", parallel_tool_calls: false });
  const newer = await client.responses.create({ model, input: "hi", max_output_tokens: 8, temperature: 0 });
  let events = 0;
  for await (const event of await client.responses.create({ model, input: "hi", max_output_tokens: 8, stream: true })) events += 1;
  return {
    text: [whole.choices[0].message.content, streamed], usage: whole.usage.completion_tokens,
    shaped: shaped.choices[0].message.parsed ?? JSON.parse(shaped.choices[0].message.content), call: called.choices[0].message.tool_calls[0].function,
    finish: called.choices[0].finish_reason, newer: newer.output_text, events,
  };
}

async function aiSdk() {
  const named = createOpenAICompatible({ name: "crossover", baseURL, supportsStructuredOutputs: true })(model);
  const common = { model: named, prompt: "hi", maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
  const whole = await generateText(common);
  let streamed = "";
  for await (const text of streamText(common).textStream) streamed += text;
  const shaped = await generateText({ ...common, maxOutputTokens: 64, output: Output.object({ schema: jsonSchema(size) }) });
  const tools = { order: tool({ inputSchema: jsonSchema(size) }) };
  const forced = { ...common, maxOutputTokens: 128, tools, toolChoice: { type: "tool", toolName: "order" } };
  const called = await generateText(forced);
  const calls = [];
  for await (const part of streamText(forced).fullStream) if (part.type === "tool-call") calls.push(part.input);
  return {
    text: [whole.text, streamed], usage: whole.usage.outputTokens, shaped: shaped.output,
    call: called.toolCalls[0].input, streamed: calls, finish: called.finishReason,
  };
}

(async () => console.log(JSON.stringify({ openai: await openai(), aiSdk: await aiSdk() })))();
