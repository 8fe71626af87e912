// The settings of the playground: a form that remembers, and the fields of a request made of it.

import { $, store } from "./dom.js";

const DEFAULTS = { temperature: "0.7", max_tokens: "512" };
const NUMBERS = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "seed",
  "repetition_penalty", "presence_penalty", "frequency_penalty",
];
const EXAMPLES = {
  json_schema: JSON.stringify(
    {
      type: "object",
      properties: { name: { type: "string" }, age: { type: "integer" } },
      required: ["name", "age"],
      additionalProperties: false,
    },
    null,
    2,
  ),
  regex: "(yes|no)",
};

export class InvalidSetting extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export class Settings {
  constructor() {
    this.form = $("settings");
    this.drafts = {};
    this.load(store.get("settings", DEFAULTS));
    this.form.addEventListener("input", (event) => {
      if (event.target.name === "format") this.showFormat();
      event.target.removeAttribute("aria-invalid");
      this.save();
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    $("reset-settings").addEventListener("click", () => {
      this.load(DEFAULTS);
      this.save();
    });
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  // What a request has beside its messages. Raises InvalidSetting. A field left empty has the server's default.
  fields() {
    const { elements } = this.form;
    const fields = {};
    for (const name of NUMBERS) {
      const input = elements[name];
      if (input.validity.badInput) throw this.invalid(input, `${labelOf(input)} must be a number.`);
      if (input.value !== "") fields[name] = Number(input.value);
    }
    const stop = elements.stop.value.split("\n").filter((line) => line !== "");
    if (stop.length) fields.stop = stop.map(unescape);
    return { ...fields, ...this.output() };
  }

  output() {
    const { format, schema } = this.form.elements;
    if (format.value === "text") return {};
    if (format.value === "json_object") return { response_format: { type: "json_object" } };
    if (format.value === "regex") return { structured_outputs: { regex: schema.value } };
    try {
      const parsed = JSON.parse(schema.value);
      return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: parsed } } };
    } catch (error) {
      throw this.invalid(schema, `The JSON schema is no JSON: ${error.message}`);
    }
  }

  // Marks the field that the server has found wrong, where it is one of these.
  mark(param) {
    const input = this.form.elements[param];
    if (input instanceof HTMLElement) input.setAttribute("aria-invalid", "true");
  }

  invalid(input, message) {
    input.setAttribute("aria-invalid", "true");
    return new InvalidSetting(input, message);
  }

  load(values) {
    for (const input of this.form.elements) {
      if (!input.name) continue;
      input.value = values[input.name] ?? (input.name === "format" ? "text" : "");
      input.removeAttribute("aria-invalid");
    }
    this.format = "";
    this.showFormat();
  }

  save() {
    const named = [...this.form.elements].filter((input) => input.name && input.value !== "");
    store.set("settings", Object.fromEntries(named.map((input) => [input.name, input.value])));
  }

  showFormat() {
    const { format, schema } = this.form.elements;
    const asks = format.value in EXAMPLES;
    $("schema-field").hidden = !asks;
    if (asks) {
      if (this.format) this.drafts[this.format] = schema.value;
      if (this.format || !schema.value) schema.value = this.drafts[format.value] ?? EXAMPLES[format.value];
      schema.rows = format.value === "regex" ? 2 : 9;
      $("schema-label").textContent = format.value === "regex" ? "Regular expression" : "JSON schema";
      this.format = format.value;
    }
  }
}

// "\n" in a line of the stop strings is a line feed: the field cannot hold one otherwise.
function unescape(text) {
  return text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}

function labelOf(input) {
  return input.closest("label").firstElementChild.textContent;
}
