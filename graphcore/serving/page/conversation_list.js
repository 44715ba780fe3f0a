/** The list of conversations: open, new, search, rename, export, import, delete. On a narrow screen it lies over all. */

import { download, jsonOf, markdownOf } from "./conversation_export.js";
import { importedConversations, LARGEST_BYTES } from "./conversation_import.js";
import { foundConversations } from "./conversation_search.js";
import { askText, askWhich } from "./dialogs.js";
import { button, icon, make } from "./dom.js";
import { counted, size } from "./number_texts.js";

const SEARCH_MILLISECONDS = 150; // after the last key, until the search begins
const DELETE = "Delete";
const MARKDOWN = "Markdown";
const EXPORT_TEXT = "JSON has all versions and settings, and can be imported again. Markdown is the text that is shown, "
  + "to read elsewhere.";
const NARROW = matchMedia("(max-width: 760px)");

/** Lists conversations, newest first. */
export class ConversationList {
  #root;
  #toggle;
  #chat;
  #store;
  #list = make("ul", { class: "conversation-list" });
  #drawn = "";
  #search = make("input", { type: "search", class: "search-field", placeholder: "Search conversations",
    "aria-label": "Search conversations", autocomplete: "off", spellcheck: "false", maxlength: 200 });
  #said = make("p", { class: "hint list-said", role: "status" });
  #input = make("input", { type: "file", accept: ".json,application/json", hidden: true,
    "aria-label": "File with conversations" });
  #wasSearch = false; // the list shows what a search has found
  #timer = 0; // of the next search
  #abort = new AbortController(); // of the search that runs

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
    const files = make("div", { class: "list-files" },
      button("Import", () => this.#input.click(), { kind: "small-button" }),
      button("Export all", () => this.#exportAll(), { kind: "small-button" }), this.#input);
    root.append(make("div", { class: "list-head" }, start, close), this.#search, this.#said,
      make("nav", { "aria-label": "Conversations" }, this.#list), files);
    this.#input.addEventListener("change", () => this.#import());
    this.#search.addEventListener("input", () => {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.draw(), SEARCH_MILLISECONDS);
    });
    this.#search.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#search.value !== "") event.stopPropagation(); // the browser empties the field
    });
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#isOpen) (event.stopPropagation(), this.#open(false));
    });
    document.addEventListener("pointerdown", ({ target }) => {
      if (this.#isOpen && !root.contains(target) && !toggle.contains(target)) this.#open(false);
    });
    store.addEventListener("conversations", () => this.draw());
    store.addEventListener("deleted", () => this.draw());
    store.addEventListener("imported", () => this.draw());
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

  /** Draws the list anew: all conversations, or those that have the text of the search. */
  async draw() {
    this.#abort.abort();
    this.#abort = new AbortController();
    const { signal } = this.#abort;
    const wanted = this.#search.value.trim();
    const found = wanted === ""
      ? (await this.#store.conversations()).map((conversation) => ({ conversation, excerpt: null }))
      : await foundConversations(this.#store, wanted, signal);
    if (signal.aborted) return;
    const current = this.#chat.conversation?.id;
    const drawn = JSON.stringify([current, wanted, found.map(({ conversation: { id, title }, excerpt }) =>
      [id, title, excerpt])]);
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    if (wanted !== "") this.#say(found.length ? `Found in ${counted(found.length, "conversation")}.` : "Nothing found.");
    else if (this.#wasSearch) this.#say("");
    this.#wasSearch = wanted !== "";
    const focused = document.activeElement?.dataset?.key;
    this.#list.replaceChildren(...found.map((one) => this.#row(one, current)));
    if (focused) this.#list.querySelector(`[data-key="${focused}"]`)?.focus();
    this.#drawBusy();
  }

  #row({ conversation, excerpt }, current) {
    const { id, title } = conversation;
    const name = { href: `#chat/${id}`, "aria-current": id === current ? "page" : null, "data-key": `${id}-open` };
    const open = make("a", { class: "conversation-link", ...name, onclick: () => this.#chosen() }, title,
      excerpt && make("span", { class: "excerpt" }, excerpt[0], make("mark", {}, excerpt[1]), excerpt[2]));
    const look = (drawing, hover) => ({ icon: drawing, title: hover, kind: "icon-button tiny" });
    const rename = button(`Rename ${title}`, () => this.#rename(conversation), look("pencil", "Rename"));
    const save = button(`Export ${title}`, () => this.#export(conversation), look("save", "Export"));
    const remove = button(`Delete ${title}`, () => this.#delete(conversation), look("trash", "Delete"));
    rename.dataset.key = `${id}-rename`;
    const buttons = make("span", { class: "row-buttons" }, rename, save, remove);
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
    const words = { title: "Delete the conversation?", text, actions: [DELETE], kind: "danger-button" };
    if ((await askWhich(words)) !== DELETE) return;
    await this.#store.deleteConversation(id);
    this.#root.querySelector("a").focus();
  }

  async #export(conversation) {
    const words = { title: "Export the conversation", text: EXPORT_TEXT, actions: ["JSON", MARKDOWN], kind: "button" };
    const chosen = await askWhich(words);
    if (chosen === null) return;
    if (chosen === MARKDOWN) download(await markdownOf(this.#store, conversation), conversation.title, "md");
    else download(await jsonOf(this.#store, [conversation]), conversation.title, "json");
  }

  async #exportAll() {
    const all = await this.#store.conversations();
    if (all.length === 0) this.#say("There is no conversation yet.");
    else {
      const blob = await jsonOf(this.#store, all);
      download(blob, `conversations ${new Date().toISOString().slice(0, 10)}`, "json");
      if (blob.size > LARGEST_BYTES) {
        this.#say(`The file has ${size(blob.size)}; Import reads at most ${size(LARGEST_BYTES)}. Export conversations one by one, too.`);
      }
    }
  }

  async #import() {
    const [file] = this.#input.files;
    this.#input.value = "";
    this.#say("");
    try {
      const { conversations, messages } = await importedConversations(file);
      const added = await this.#store.addImported(conversations, messages);
      const rest = conversations.length - added;
      const left = rest ? ` Here already, and left as they are: ${rest}.` : "";
      this.#say(`Imported ${counted(added, "conversation")}.${left}`);
    } catch (error) {
      this.#say(`${file.name} was not imported: ${error.message}`);
    }
  }

  #say(text) {
    this.#said.textContent = text;
  }
}
