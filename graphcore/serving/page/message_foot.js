/** The line below a message: its versions, facts and buttons. */

import { button, make } from "./dom.js";

/**
 * Makes a row that goes through the versions of a message.
 * @param {{ids: string[], at: number, choose: (id: string) => void}} versions
 * @returns {HTMLElement|null} null if there is one version
 */
export function versionsRow({ ids, at, choose }) {
  if (ids.length < 2) return null;
  const go = (label, step, drawing) => {
    const look = { icon: drawing, kind: "icon-button tiny" };
    const one = button(label, () => ids[at + step] && choose(ids[at + step]), look);
    if (!ids[at + step]) one.setAttribute("aria-disabled", "true");
    return one;
  };
  return make("div", { class: "versions", role: "group", "aria-label": "Versions" },
    go("Earlier version", -1, "back"), make("span", {}, `${at + 1} of ${ids.length}`),
    go("Later version", 1, "forward"));
}

/**
 * Makes the line.
 * @param {(HTMLElement|null)[]} parts
 * @returns {HTMLElement}
 */
export function messageFoot(...parts) {
  return make("footer", { class: "message-foot" }, ...parts);
}

/**
 * @param {string} label
 * @param {() => void} act
 * @returns {HTMLButtonElement}
 */
export function footButton(label, act) {
  return button(label, act, { kind: "small-button" });
}
