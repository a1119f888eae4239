// Both SDKs in JavaScript: whole, streamed, tools, structured output, what was read, an error, an abort. The last line of stdout is what they saw, as JSON.
// Packages are found from the folder that is given second.
import { createRequire } from "node:module";
import path from "node:path";

const [url, folder] = process.argv.slice(2);
const require = createRequire(path.join(folder, "package.json"));
const OpenAI = require("openai").default ?? require("openai");
const Anthropic = require("@anthropic-ai/sdk").default ?? require("@anthropic-ai/sdk");

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "k", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "k", maxRetries: 0 });
const messages = [{ role: "user", content: "What does the file say?" }];
const schema = { type: "object", properties: { path: { type: "string" } }, required: ["path"] };
const seen = {};

const chat = { model: "m", messages, max_tokens: 200 };
const tools = [{ type: "function", function: { name: "read", parameters: schema } }];
seen.chat = (await openai.chat.completions.create(chat)).choices[0].message.content;
seen.chatStream = "";
for await (const chunk of await openai.chat.completions.create({ ...chat, stream: true })) {
  seen.chatStream += chunk.choices[0]?.delta?.content ?? "";
}
seen.chatCall = (await openai.chat.completions.create({ ...chat, tools })).choices[0].message.tool_calls[0].function;

const response = { model: "m", input: "What does the file say?", max_output_tokens: 200 };
seen.response = (await openai.responses.create(response)).output_text;
seen.responseStream = "";
for await (const event of await openai.responses.create({ ...response, stream: true })) {
  if (event.type === "response.output_text.delta") seen.responseStream += event.delta;
}

const message = { model: "m", messages, max_tokens: 200 };
const own = [{ name: "read", input_schema: schema }];
seen.message = (await anthropic.messages.create(message)).content[0].text;
seen.messageStream = await anthropic.messages.stream(message).finalText();
seen.messageCall = (await anthropic.messages.stream({ ...message, tools: own }).finalMessage()).content.at(-1).input;
try {
  await anthropic.messages.create({ ...message, messages: [{ role: "user", content: "word ".repeat(60000) }] });
} catch (error) {
  seen.refused = [error.status, error.message.includes("prompt is too long")];
}

const age = { type: "integer", minimum: 0, maximum: 120 };
const person = { type: "object", properties: { age }, required: ["age"], additionalProperties: false };
const format = { type: "json_schema", json_schema: { name: "person", schema: person } };
seen.person = JSON.parse((await openai.chat.completions.create({ ...chat, response_format: format })).choices[0].message.content);

const stream = anthropic.messages.stream({ ...message, max_tokens: 4000 });
stream.on("error", () => {});
stream.on("text", () => stream.abort());
seen.aborted = await stream.done().then(() => false, (error) => error instanceof Anthropic.APIUserAbortError);

const again = await anthropic.messages.create({ ...message, diagnostics: { previous_message_id: "msg_unknown" } });
seen.read = again.usage.cache_read_input_tokens;
seen.missed = again.diagnostics.cache_miss_reason.type;
console.log(JSON.stringify(seen));
