/** Calls of tools in an answer, and a form for what the tools return. */

import { codeBlock } from "./markdown.js";
import { make } from "./dom.js";
import { indentedJson } from "./json_texts.js";

const HINT = "The page runs no tools. Enter what the tool returns, and the model goes on.";

/** Shows the calls of one answer. */
export class ToolCallsView {
  element = make("div", { class: "tool-calls" });
  #drawn = [];

  /**
   * Shows calls.
   * @param {{id: string, name: string, args: string}[]} calls
   */
  set(calls) {
    calls.forEach(({ name, args }, at) => {
      if (this.#drawn[at] === name + args) return;
      this.#drawn[at] = name + args;
      const head = make("p", { class: "tool-name" }, "Calls the tool ", make("code", {}, name));
      const call = make("div", { class: "tool-call" }, head, codeBlock("arguments", indentedJson(args) ?? args));
      if (this.element.children[at]) this.element.children[at].replaceWith(call);
      else this.element.append(call);
    });
  }
}

/**
 * Makes a form for the results of calls.
 * @param {Message} message the answer that calls
 * @param {(texts: string[]) => void} send
 * @returns {HTMLFormElement}
 */
export function resultsForm(message, send) {
  const fields = message.toolCalls.map((_, at) => make("textarea", { id: `result-${message.id}-${at}`, rows: 3 }));
  const labelled = fields.map((field, at) => make("div", { class: "field" },
    make("label", { for: field.id }, `Result of ${message.toolCalls[at].name}`), field));
  const submit = (event) => {
    event.preventDefault();
    send(fields.map(({ value }) => value));
  };
  const hint = make("p", { class: "hint" }, HINT);
  const label = fields.length > 1 ? "Send results" : "Send result";
  return make("form", { class: "results-form", onsubmit: submit }, ...labelled, hint,
    make("button", { type: "submit", class: "button" }, label));
}
