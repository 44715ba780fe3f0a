/** The list of conversations: open, new, rename, delete. On a narrow screen it lies over the conversation. */

import { askText, askYes } from "./dialogs.js";
import { button, icon, make } from "./dom.js";

const NARROW = matchMedia("(max-width: 760px)");

/** Lists conversations, newest first. */
export class ConversationList {
  #root;
  #toggle;
  #chat;
  #store;
  #list = make("ul", { class: "conversation-list" });
  #drawn = "";

  /**
   * @param {HTMLElement} root
   * @param {HTMLButtonElement} toggle button that shows the list on a narrow screen
   * @param {Chat} chat
   * @param {ConversationStore} store
   */
  constructor(root, toggle, chat, store) {
    this.#root = root;
    this.#toggle = toggle;
    this.#chat = chat;
    this.#store = store;
    toggle.append(icon("menu"));
    toggle.setAttribute("aria-label", "Conversations");
    toggle.addEventListener("click", () => this.#open(toggle.getAttribute("aria-expanded") !== "true"));
    const start = make("a", { class: "new-button", href: "#chat", onclick: () => this.#chosen() },
      icon("plus"), "New conversation");
    const close = button("Close the list", () => this.#open(false), { icon: "close", kind: "icon-button narrow-only" });
    root.append(make("div", { class: "list-head" }, start, close),
      make("nav", { "aria-label": "Conversations" }, this.#list));
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#isOpen) (event.stopPropagation(), this.#open(false));
    });
    document.addEventListener("pointerdown", ({ target }) => {
      if (this.#isOpen && !root.contains(target) && !toggle.contains(target)) this.#open(false);
    });
    store.addEventListener("conversations", () => this.draw());
    store.addEventListener("deleted", () => this.draw());
    chat.addEventListener("opened", () => this.draw());
    chat.addEventListener("change", () => this.#drawBusy());
  }

  get #isOpen() {
    return NARROW.matches && this.#root.classList.contains("is-open");
  }

  #open(isOpen) {
    this.#root.classList.toggle("is-open", isOpen);
    this.#toggle.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) this.#root.querySelector("a").focus();
    else this.#toggle.focus();
  }

  #chosen() {
    if (this.#isOpen) this.#open(false);
  }

  /** Draws the list anew. */
  async draw() {
    const found = await this.#store.conversations();
    const current = this.#chat.conversation?.id;
    const drawn = JSON.stringify([current, found.map(({ id, title }) => [id, title])]);
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    const focused = document.activeElement?.dataset?.key;
    this.#list.replaceChildren(...found.map((conversation) => this.#row(conversation, current)));
    if (focused) this.#list.querySelector(`[data-key="${focused}"]`)?.focus();
    this.#drawBusy();
  }

  #row(conversation, current) {
    const { id, title } = conversation;
    const name = { href: `#chat/${id}`, "aria-current": id === current ? "page" : null, "data-key": `${id}-open` };
    const open = make("a", { class: "conversation-link", ...name, onclick: () => this.#chosen() }, title);
    const look = (drawing, hover) => ({ icon: drawing, title: hover, kind: "icon-button tiny" });
    const rename = button(`Rename ${title}`, () => this.#rename(conversation), look("pencil", "Rename"));
    const remove = button(`Delete ${title}`, () => this.#delete(conversation), look("trash", "Delete"));
    rename.dataset.key = `${id}-rename`;
    const buttons = make("span", { class: "row-buttons" }, rename, remove);
    return make("li", { class: "conversation-row", "data-id": id }, open, buttons);
  }

  #drawBusy() {
    const busy = this.#chat.busyConversations;
    for (const row of this.#list.children) row.classList.toggle("is-busy", busy.has(row.dataset.id));
  }

  async #rename({ id, title }) {
    const name = await askText({ title: "Rename the conversation", label: "Name", value: title, action: "Rename" });
    if (name) await this.#store.changeConversation(id, (conversation) => (conversation.title = name));
  }

  async #delete({ id, title }) {
    const text = `\u201c${title}\u201d and its messages are removed from this browser. This cannot be undone.`;
    if (!(await askYes({ title: "Delete the conversation?", text, action: "Delete" }))) return;
    await this.#store.deleteConversation(id);
    this.#root.querySelector("a").focus();
  }
}
