/** Copying to the clipboard, also where the page came over plain HTTP and browsers hide the clipboard. */

import { announce, make } from "./dom.js";

const SHOWN_MILLISECONDS = 1500;

/**
 * Makes a button that copies a text.
 * @param {() => string} textOf
 * @param {string} name for screen readers
 * @returns {HTMLButtonElement}
 */
export function copyButton(textOf, name) {
  const copy = async () => {
    const isCopied = await copied(textOf());
    button.textContent = isCopied ? "Copied" : "Not copied";
    announce(isCopied ? "Copied." : "The browser did not allow copying.");
    setTimeout(() => (button.textContent = "Copy"), SHOWN_MILLISECONDS);
  };
  const button = make("button", { type: "button", class: "small-button", "aria-label": name, onclick: copy }, "Copy");
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text);
  }
}

function copiedBySelection(text) {
  const focused = document.activeElement;
  const field = make("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}
