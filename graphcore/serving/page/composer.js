/** The field for the next message, with its files. What is typed is kept until it is sent. */

import { ContextFill } from "./context_fill.js";
import { announce, button, icon, make } from "./dom.js";
import { size } from "./number_texts.js";
import { readFiles } from "./text_files.js";

const SAVE_MILLISECONDS = 250;
const TALLEST = 0.4; // of the window
const FINE_POINTER = matchMedia("(pointer: fine)"); // where no keyboard covers the page when the field has the focus
const COARSE_POINTER = matchMedia("(pointer: coarse)"); // a finger: what is said of keys does not help there
const LATE_MILLISECONDS = 500; // after an answer, for which a click was meant to stop it
const LONG_TEXT = 5_000; // characters, for which the field has its full height without being measured

/** Writes messages for a chat. */
export class Composer {
  #chat;
  #store;
  #files = [];
  #draftId = null; // before the first conversation is opened
  #isReading = false; // the draft, which is kept as it is until something else is typed
  #timer = 0;
  #field = make("textarea", { id: "message-field", rows: 1, placeholder: "Write a message", enterkeyhint: "send",
    "aria-describedby": "composer-hint composer-said" });
  #hint = make("p", { id: "composer-hint", class: "hint", hidden: COARSE_POINTER.matches },
    COARSE_POINTER.matches ? "" : "Enter sends, Shift+Enter starts a new line.");
  #fill;
  #chips = make("ul", { class: "chips", "aria-label": "Files of the message", hidden: true });
  #said = make("p", { id: "composer-said", class: "field-error", role: "alert" });
  #send = make("button", { type: "submit", class: "send-button" });
  #input = make("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files of text" });
  #isBusy = null;
  #ended = -Infinity; // time at which the last answer ended

  /**
   * @param {HTMLFormElement} form
   * @param {HTMLElement} target element that files are dropped into
   * @param {Chat} chat
   * @param {ConversationStore} store
   */
  constructor(form, target, chat, store) {
    this.#chat = chat;
    this.#store = store;
    this.#fill = new ContextFill(chat);
    const attach = button("Add files of text", () => this.#input.click(), { icon: "attach" });
    form.append(this.#chips, this.#said,
      make("div", { class: "composer-row" }, attach,
        make("label", { for: "message-field", class: "visually-hidden" }, "Message"), this.#field, this.#send),
      make("div", { class: "composer-foot" }, this.#hint, this.#fill.element), this.#input);
    this.#listen(form, target);
    chat.addEventListener("opened", () => this.#load(chat.conversation?.id ?? "new"));
    chat.addEventListener("opened", () => FINE_POINTER.matches && this.#field.focus());
    chat.addEventListener("change", () => this.#drawSend());
  }

  /**
   * Sets the size of the model's context.
   * @param {number|null} tokens
   */
  setContext(tokens) {
    this.#fill.setSize(tokens);
  }

  #listen(form, target) {
    this.#send.addEventListener("click", (event) => {
      const isLate = !this.#isBusy && performance.now() - this.#ended < LATE_MILLISECONDS;
      if (event.detail > 0 && isLate) event.preventDefault(); // Enter is no click of a pointer
    });
    form.addEventListener("submit", (event) => (event.preventDefault(), this.#submit()));
    this.#field.addEventListener("input", () => (this.#fit(), this.#say(""), this.#saveSoon()));
    this.#field.addEventListener("keydown", (event) => this.#key(event));
    this.#field.addEventListener("paste", (event) => {
      if (event.clipboardData.files.length === 0) return;
      event.preventDefault();
      this.#add(event.clipboardData.files);
    });
    this.#input.addEventListener("change", () => (this.#add([...this.#input.files]), (this.#input.value = "")));
    this.#listenToDrops(target);
    window.addEventListener("pagehide", () => this.#leave());
    window.addEventListener("resize", () => this.#fit());
  }

  #listenToDrops(target) {
    const withFiles = (listener) => (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      listener(event);
    };
    target.addEventListener("dragover", withFiles(() => target.classList.add("is-dropping")));
    target.addEventListener("dragleave", ({ relatedTarget }) => {
      if (!target.contains(relatedTarget)) target.classList.remove("is-dropping");
    });
    target.addEventListener("drop", withFiles(({ dataTransfer }) => {
      target.classList.remove("is-dropping");
      this.#add([...dataTransfer.files]);
    }));
  }

  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    if (!this.#isBusy) this.#submit();
    else this.#say("An answer is being made. Stop it, or wait until it is complete; what you write is kept.");
  }

  async #submit() {
    if (this.#isBusy) {
      this.#chat.stop();
      return;
    }
    const draft = { text: this.#field.value, files: this.#files };
    if (!draft.text.trim() && draft.files.length === 0) {
      this.#say("Write a message first, or add a file.");
      this.#field.focus();
      return;
    }
    this.#set({ text: "", files: [] });
    this.#store.saveDraft(this.#draftId, { text: "", files: [] });
    await this.#chat.send(draft);
  }

  async #add(files) {
    const taken = this.#files.reduce((sum, file) => sum + file.size, 0);
    const { read, refused } = await readFiles(files, taken);
    this.#files = [...this.#files, ...read];
    this.#say(refused.join(" "));
    this.#drawChips();
    if (read.length) announce(`Added ${read.map(({ name }) => name).join(", ")}.`);
    this.#save();
  }

  #remove(at) {
    this.#files = this.#files.filter((_, other) => other !== at);
    this.#drawChips();
    this.#field.focus();
    this.#save();
  }

  async #load(draftId) {
    clearTimeout(this.#timer);
    if (this.#draftId !== null && draftId !== this.#draftId) this.#save();
    this.#draftId = draftId;
    this.#set({ text: "", files: [] });
    this.#isReading = true;
    const draft = await this.#store.draft(draftId);
    if (draftId !== this.#draftId) return;
    this.#isReading = false;
    if (draft && !this.#isTouched()) this.#set(draft);
  }

  #isTouched() {
    return this.#field.value !== "" || this.#files.length > 0;
  }

  /** Follows a new conversation that got its first message: what is typed now belongs to it. */
  begun(draftId) {
    this.#draftId = draftId;
    this.#isReading = false;
  }

  #set({ text, files }) {
    clearTimeout(this.#timer);
    this.#field.value = text;
    this.#files = files;
    this.#say("");
    this.#drawChips();
    this.#fit();
  }

  #saveSoon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#save(), SAVE_MILLISECONDS);
  }

  #save() {
    clearTimeout(this.#timer);
    if (this.#draftId === null) return;
    this.#store.saveDraft(this.#draftId, { text: this.#field.value, files: this.#files });
  }

  #leave() {
    if (this.#draftId === null || (this.#isReading && !this.#isTouched())) return;
    this.#save();
    this.#store.leaveDraft(this.#draftId, this.#field.value);
  }

  #say(text) {
    this.#said.textContent = text;
  }

  #drawChips() {
    this.#chips.hidden = this.#files.length === 0;
    this.#chips.replaceChildren(...this.#files.map(({ name, size: bytes }, at) => make("li", { class: "chip" },
      make("span", { class: "chip-name" }, name), make("span", { class: "muted" }, size(bytes)),
      button(`Remove ${name}`, () => this.#remove(at), { icon: "close", kind: "icon-button tiny" }))));
  }

  #drawSend() {
    const isBusy = this.#chat.runningMessage !== undefined;
    if (isBusy === this.#isBusy) return;
    if (this.#isBusy) this.#ended = performance.now();
    this.#isBusy = isBusy;
    this.#send.replaceChildren(icon(isBusy ? "stop" : "send"), isBusy ? "Stop" : "Send");
    if (!COARSE_POINTER.matches) this.#send.title = isBusy ? "Stop (Escape)" : "Send (Enter)";
    if (!isBusy) this.#say("");
  }

  #fit() {
    const most = Math.round(innerHeight * TALLEST);
    this.#field.style.height = "auto";
    const height = this.#field.value.length > LONG_TEXT ? most : Math.min(this.#field.scrollHeight + 2, most);
    this.#field.style.height = `${height}px`;
  }
}
