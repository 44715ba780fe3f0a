/** Elements, made without markup: text can never become an element or a script. */

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  attach: "M13.5 7.5 8 13a3.5 3.5 0 0 1-5-5l6-6a2.3 2.3 0 0 1 3.3 3.3L6.5 11A1 1 0 0 1 5 9.5l5-5",
  back: "M10 3 5 8l5 5",
  close: "M4 4l8 8M12 4l-8 8",
  forward: "M6 3l5 5-5 5",
  load: "M8 10.5V2M4.5 5.5 8 2l3.5 3.5M2.5 11v2.5h11V11",
  menu: "M2 4h12M2 8h12M2 12h12",
  moon: "M13 9.7A5.5 5.5 0 1 1 6.3 3a4.4 4.4 0 0 0 6.7 6.7z",
  pencil: "M3 13l.6-2.8L11 2.8 13.2 5l-7.4 7.4z",
  plus: "M8 3v10M3 8h10",
  save: "M8 2v8.5M4.5 7 8 10.5 11.5 7M2.5 11v2.5h11V11",
  screen: "M2 3h12v8H2zM8 11v2.5M5.5 13.5h5",
  send: "M8 13V3M3.5 7.5 8 3l4.5 4.5",
  settings: "M2 5h7M13 5h1M2 11h1M7 11h7M11 3.2a1.8 1.8 0 1 1 0 3.6 1.8 1.8 0 0 1 0-3.6"
    + "M5 9.2a1.8 1.8 0 1 1 0 3.6 1.8 1.8 0 0 1 0-3.6",
  stop: "M4.5 4.5h7v7h-7z",
  sun: "M8 5.2a2.8 2.8 0 1 1 0 5.6 2.8 2.8 0 0 1 0-5.6M8 1.2v1.4M8 13.4v1.4M1.2 8h1.4M13.4 8h1.4M3.2 3.2l1 1"
    + "M11.8 11.8l1 1M12.8 3.2l-1 1M4.2 11.8l-1 1",
  trash: "M3 4.5h10M6 4.5V3h4v1.5M4.5 4.5 5 13h6l.5-8.5",
};

/**
 * Makes an element.
 * @param {string} tag its name
 * @param {Object<string, unknown>} [properties] attributes; `on…` are listeners; false, null and undefined are left out
 * @param {...(Node|string|null|undefined|false)} children
 * @returns {HTMLElement}
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * Makes a drawing of 16 by 16 pixels, which screen readers leave out.
 * @param {keyof typeof ICONS} name
 * @returns {SVGElement}
 */
export function icon(name) {
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", "0 0 16 16");
  drawing.setAttribute("class", "icon");
  drawing.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  drawing.append(path);
  return drawing;
}

/**
 * Makes a button.
 * @param {string} label its text, or its name if it shows an icon alone
 * @param {(event: Event) => void} onclick
 * @param {{icon?: string, kind?: string, title?: string}} [look] icon shown instead of the text, and class
 * @returns {HTMLButtonElement}
 */
export function button(label, onclick, look = {}) {
  if (!look.icon) return make("button", { type: "button", class: look.kind ?? "button", onclick }, label);
  const names = { "aria-label": label, title: look.title ?? label };
  return make("button", { type: "button", class: look.kind ?? "icon-button", ...names, onclick }, icon(look.icon));
}

/** @returns {string} a new random name; it also works where the page came over plain HTTP */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Says a short text to screen readers.
 * @param {string} text
 */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
