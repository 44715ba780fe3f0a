/** The dialog that asks for the server's key. */

import { shown } from "./dialogs.js";
import { button, make } from "./dom.js";

const OUTDATED = "The server does not take the key any more that this tab has. Enter the present one.";
const WRONG = "The server does not take this key. Check it and try again.";
const UNUSABLE = "A key has letters, digits and signs without spaces. Check what you have pasted.";

/**
 * Asks for the key until it is right.
 * @param {(key: string) => Promise<boolean>} isTaken whether the server takes a key
 * @param {boolean} hadKey true if the server has just refused one
 * @returns {Promise<string|null>} null if the dialog was closed without one
 */
export async function askKey(isTaken, hadKey) {
  let found = null;
  const { dialog, form, field, said, send } = keyForm(() => dialog.close());
  said.textContent = hadKey ? OUTDATED : "";
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (send.getAttribute("aria-disabled")) return;
    send.setAttribute("aria-disabled", "true");
    const key = field.value.trim();
    said.textContent = (await complaint(key, isTaken)) ?? "";
    send.removeAttribute("aria-disabled");
    if (said.textContent === "") {
      found = key;
      dialog.close();
    } else {
      field.setAttribute("aria-invalid", "true");
      field.select();
    }
  });
  await shown(dialog);
  return found;
}

async function complaint(key, isTaken) {
  if (!/^[!-~]+$/.test(key)) return UNUSABLE;
  try {
    return (await isTaken(key)) ? null : WRONG;
  } catch (error) {
    return error.message;
  }
}

function keyForm(cancel) {
  const names = { type: "password", autocomplete: "off", "aria-describedby": "key-help key-said", required: true };
  const field = make("input", { id: "key-field", ...names });
  const said = make("p", { id: "key-said", class: "field-error", role: "alert" });
  const send = make("button", { type: "submit", class: "main-button" }, "Continue");
  const help = make("p", { id: "key-help", class: "hint" },
    "It comes from the person who started the server: ", make("code", {}, "task.api_key"), " or the variable ",
    make("code", {}, "GRAPHCORE_API_KEY"), ". It is kept for this tab only, and forgotten when the tab is closed.");
  const form = make("form", { novalidate: true }, make("h2", { id: "key-title" }, "This server needs a key"),
    make("div", { class: "field" }, make("label", { for: "key-field" }, "Key"), field, said, help),
    make("div", { class: "dialog-end" }, button("Cancel", cancel), send));
  const dialog = make("dialog", { class: "dialog", "aria-labelledby": "key-title" }, form);
  return { dialog, form, field, said, send };
}
