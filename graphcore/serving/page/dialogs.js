/** Small dialogs: a question, and a text to enter. The browser keeps the focus inside and gives it back. */

import { button, make } from "./dom.js";

/**
 * Shows a dialog until it is closed.
 * @param {HTMLDialogElement} dialog
 * @returns {Promise<void>}
 */
export function shown(dialog) {
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve();
    });
  });
}

/**
 * Asks which of some actions to do.
 * @param {{title: string, text: string, actions: string[], kind: string}} words kind is the class of their buttons
 * @returns {Promise<string|null>} null if the dialog was closed
 */
export async function askWhich({ title, text, actions, kind }) {
  let chosen = null;
  const choices = actions.map((action) => button(action, () => ((chosen = action), dialog.close()), { kind }));
  const no = button("Cancel", () => dialog.close());
  const dialog = make("dialog", { class: "dialog", "aria-labelledby": "dialog-title" },
    make("h2", { id: "dialog-title" }, title), make("p", {}, text), make("div", { class: "dialog-end" }, no, ...choices));
  const closed = shown(dialog);
  no.focus();
  await closed;
  return chosen;
}

/**
 * Asks for a text.
 * @param {{title: string, label: string, value: string, action: string}} words
 * @returns {Promise<string|null>} null if the dialog was closed
 */
export async function askText({ title, label, value, action }) {
  let found = null;
  const field = make("input", { id: "dialog-field", type: "text", maxlength: 200, autocomplete: "off" });
  field.value = value;
  const take = (event) => {
    event.preventDefault();
    found = field.value.trim() || null;
    dialog.close();
  };
  const dialog = make("dialog", { class: "dialog", "aria-labelledby": "dialog-title" },
    make("form", { onsubmit: take }, make("h2", { id: "dialog-title" }, title),
      make("div", { class: "field" }, make("label", { for: "dialog-field" }, label), field),
      make("div", { class: "dialog-end" }, button("Cancel", () => dialog.close()),
        make("button", { type: "submit", class: "main-button" }, action))));
  const closed = shown(dialog);
  field.select();
  await closed;
  return found;
}
