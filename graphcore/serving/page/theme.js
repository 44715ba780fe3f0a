/** The page's colours: as the system has them, light, or dark. The choice is kept in the browser, for all tabs. */

import { announce, icon } from "./dom.js";

const STORED = "graphcore.theme";
const DARK = "(prefers-color-scheme: dark)";
const THEMES = {
  system: { drawing: "screen", words: "as the system", media: DARK },
  light: { drawing: "sun", words: "light", media: "not all" },
  dark: { drawing: "moon", words: "dark", media: "all" },
};

/**
 * Makes a button go through the themes. What draws without style sheets hears of a change by the document's event
 * "theme".
 * @param {HTMLButtonElement} button
 */
export function startTheme(button) {
  const rules = Array.from(document.styleSheets, readRules).flat();
  let theme = "system";
  const set = (wished) => {
    theme = Object.hasOwn(THEMES, wished) ? wished : "system";
    const { drawing, words, media } = THEMES[theme];
    for (const rule of rules) rule.media.mediaText = media;
    document.documentElement.style.colorScheme = theme === "system" ? "" : theme;
    button.replaceChildren(icon(drawing));
    button.title = `Theme: ${words}`;
    button.setAttribute("aria-label", button.title);
    document.dispatchEvent(new Event("theme"));
  };
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    set(names[(names.indexOf(theme) + 1) % names.length]);
    keep(theme);
    announce(`${button.title}.`);
  });
  window.addEventListener("storage", ({ key, newValue }) => key === STORED && set(newValue));
  set(kept());
}

/** Returns the rules of the style sheets that hold where the system's colours are dark, nested ones too. */
function darkRules(rules) {
  return Array.from(rules).flatMap((rule) => [
    ...(rule instanceof CSSMediaRule && rule.conditionText === DARK ? [rule] : []), ...darkRules(rule.cssRules ?? []),
  ]);
}

function readRules(sheet) {
  try {
    return darkRules(sheet.cssRules);
  } catch {
    return []; // it did not load, or is another site's
  }
}

function kept() {
  try {
    return localStorage.getItem(STORED) ?? "system";
  } catch {
    return "system"; // the browser keeps nothing for this page
  }
}

function keep(theme) {
  try {
    localStorage.setItem(STORED, theme);
  } catch {
    // the browser keeps nothing for this page: the theme lasts until it is loaded again
  }
}
