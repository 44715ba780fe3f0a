// Elements made without markup, and changes that touch the document only where something differs.

/**
 * Returns a new element.
 * @param {string} tag
 * @param {Record<string, string | boolean | number | null | undefined>} [attributes] "text" is the element's text;
 *     true sets an attribute without a value, and false, null and undefined leave it out.
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = String(value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}

/**
 * Returns a new section with a heading, which names it.
 * @param {string} id
 * @param {string} title
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function makeSection(id, title, ...children) {
  const heading = make("h2", { id: `${id}-title`, text: title });
  return make("section", { class: "engine-panel", id, "aria-labelledby": `${id}-title` }, heading, ...children);
}

/**
 * Sets an element's text where it differs.
 * @param {Node} node
 * @param {string} text
 */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Sets or, with null, removes an attribute where it differs.
 * @param {Element} node
 * @param {string} name
 * @param {string | null} value
 */
export function setAttribute(node, name, value) {
  if (node.getAttribute(name) === value) return;
  if (value === null) node.removeAttribute(name);
  else node.setAttribute(name, value);
}

/**
 * Makes an element's children as many as there are items, and updates each with its item.
 * @template T
 * @param {Element} parent
 * @param {T[]} items
 * @param {() => Element} create
 * @param {(child: Element, item: T, index: number) => void} update
 */
export function fillChildren(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(create());
  items.forEach((item, index) => update(parent.children[index], item, index));
}

/**
 * Returns a table with a caption that only screen readers have, and headings for its columns.
 * @param {string} caption
 * @param {string[]} columns
 * @returns {{table: HTMLElement, body: HTMLElement}}
 */
export function makeTable(caption, columns) {
  const heads = columns.map((column) => make("th", { scope: "col", text: column }));
  const body = make("tbody");
  const table = make("table", { class: "engine-table" });
  const hidden = make("caption", { class: "visually-hidden", text: caption });
  table.append(hidden, make("thead", {}, make("tr", {}, ...heads)), body);
  return { table, body };
}

/**
 * Makes a table's rows show texts; the first of each row is its heading.
 * @param {Element} body
 * @param {string[][]} rows
 * @param {string[]} columns names of the columns, shown beside the cells where the table is shown as cards
 */
export function fillRows(body, rows, columns) {
  const create = () => {
    const cells = columns.map((column, index) =>
      make(index === 0 ? "th" : "td", index === 0 ? { scope: "row" } : { "data-column": column }),
    );
    return make("tr", {}, ...cells);
  };
  fillChildren(body, rows, create, (row, texts) => {
    texts.forEach((text, index) => setText(row.children[index], text));
  });
}
