// OpenAI's SDK for Node. Arguments: base URL, model. Prints what must not depend on drafts.
import assert from "node:assert";
import { createRequire } from "node:module";

const OpenAI = createRequire(process.cwd() + "/")("openai");
const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "say la la la la" }];
const told = {};

const models = await client.models.list();
assert.deepEqual(models.data.map((entry) => entry.id), [model]);

const whole = await client.chat.completions.create({
  model, messages, max_tokens: 24, seed: 5, n: 2, logprobs: true, top_logprobs: 1,
});
told.choices = whole.choices.map((choice) => choice.message.content);
assert(whole.choices.every((choice) => choice.logprobs.content.length > 0));

const stream = await client.chat.completions.create({
  model, messages, max_tokens: 24, temperature: 0, stream: true,
  stream_options: { include_usage: true },
});
told.stream = "";
let usage = null;
for await (const chunk of stream) {
  told.stream += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert(usage.completion_tokens <= 24);

const answer = await client.chat.completions.create({
  model, messages, max_tokens: 200, temperature: 0,
  response_format: {
    type: "json_schema",
    json_schema: {
      name: "answer",
      strict: true,
      schema: {
        type: "object",
        properties: { yes: { type: "boolean" } },
        required: ["yes"],
        additionalProperties: false,
      },
    },
  },
});
told.object = JSON.parse(answer.choices[0].message.content);
assert.equal(typeof told.object.yes, "boolean");

const text = await client.completions.create({ model, prompt: "la la", max_tokens: 12, temperature: 0 });
told.text = text.choices[0].text;

await assert.rejects(
  client.completions.create({ model, prompt: "a", suffix: "b" }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "suffix",
);
console.log(JSON.stringify(told));
