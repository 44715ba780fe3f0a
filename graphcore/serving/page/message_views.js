/** A user's message and a tool's result on the page. */

import { copyButton } from "./copying.js";
import { button, make } from "./dom.js";
import { asWritten } from "./markdown.js";
import { footButton, messageFoot, versionsRow } from "./message_foot.js";
import { size } from "./number_texts.js";

const KEPT = "The earlier message and its answers are kept as another version.";
const BUSY = "An answer is being made. Wait until it is complete, or stop it.";

/** Shows a message of the user, which can be edited. */
export class UserView {
  #body = make("div", { class: "user-body" });
  #foot = make("div");
  #message;
  #actions;
  #around = null;
  #isBusy = false;
  element = make("article", { class: "message user", tabindex: -1, "aria-label": "Your message" },
    this.#body, this.#foot);

  /**
   * @param {Message} message
   * @param {{edit: (message: Message, text: string) => void}} actions
   */
  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.#drawBody();
  }

  /**
   * @param {Message} message
   * @param {{versions: object, isBusy: boolean}} around
   */
  update(message, around) {
    this.#isBusy = around.isBusy;
    const seen = JSON.stringify([around.versions.ids, around.isBusy]);
    if (seen === this.#around) return;
    this.#around = seen;
    const edit = around.isBusy ? null : footButton("Edit", () => this.#edit());
    const buttons = make("div", { class: "foot-buttons" }, edit, copyButton(() => this.#message.text, "Copy message"));
    this.#foot.replaceChildren(messageFoot(versionsRow(around.versions), buttons));
  }

  #drawBody() {
    const { text, files } = this.#message;
    this.#body.replaceChildren(...files.map(foldedFile), ...(text ? [asWritten(text)] : []));
    this.#foot.hidden = false;
  }

  #edit() {
    const field = make("textarea", { class: "edit-field", "aria-label": "Edit the message", rows: 3 });
    field.value = this.#message.text;
    const hint = make("p", { class: "hint", role: "status" }, KEPT);
    const cancel = () => (this.#drawBody(), this.#foot.querySelector("button")?.focus());
    const send = () => {
      if (this.#isBusy) hint.textContent = BUSY;
      else if (field.value.trim()) (this.#drawBody(), this.#actions.edit(this.#message, field.value));
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") (event.stopPropagation(), cancel());
      if (event.key === "Enter" && !event.shiftKey) (event.preventDefault(), send());
    });
    const end = make("div", { class: "dialog-end" }, button("Cancel", cancel),
      button("Send", send, { kind: "main-button" }));
    this.#body.replaceChildren(...this.#message.files.map(foldedFile), field, hint, end);
    this.#foot.hidden = true;
    field.focus();
  }
}

/** Shows what a tool has returned. */
export class ToolView {
  element;

  /** @param {Message} message */
  constructor({ name, text }) {
    this.element = make("article", { class: "message tool", tabindex: -1, "aria-label": "Result of a tool" },
      make("details", {}, make("summary", {}, "Result of ", make("code", {}, name)), asWritten(text)));
  }

  update() {}
}

function foldedFile({ name, size: bytes, text }) {
  const summary = make("summary", {}, name, " ", make("span", { class: "muted" }, size(bytes)));
  const details = make("details", { class: "file" }, summary);
  details.addEventListener("toggle", () => details.children.length === 1 && details.append(asWritten(text)));
  return details;
}
