/** The messages of the open conversation, and the scrolling with them. */

import { AnswerView } from "./answer_view.js";
import { make } from "./dom.js";
import { ToolView, UserView } from "./message_views.js";

const NEAR_END = 40; // pixels from the end within which the view follows the newest text

/** Shows the messages of a chat. */
export class MessagesView {
  #chat;
  #root;
  #newest;
  #list = make("div", { class: "message-list" });
  #views = new Map();
  #isFollowing = true;

  /**
   * @param {Chat} chat
   * @param {HTMLElement} root the element that scrolls
   * @param {HTMLButtonElement} newest button that goes to the end
   */
  constructor(chat, root, newest) {
    this.#chat = chat;
    this.#root = root;
    this.#newest = newest;
    root.append(this.#list);
    root.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    newest.addEventListener("click", () => (this.#goToEnd(), root.focus({ preventScroll: true })));
    chat.addEventListener("opened", () => this.#reset());
    chat.addEventListener("change", () => this.#update());
    chat.addEventListener("grown", ({ detail: { id } }) => this.#views.get(id)?.grow(chat.progressOf(id)));
    new ResizeObserver(() => this.#follow()).observe(root);
  }

  #reset() {
    this.#views.clear();
    this.#list.replaceChildren();
    this.#isFollowing = true;
  }

  #update() {
    const list = this.#list;
    const path = this.#chat.path;
    const isBusy = this.#chat.runningMessage !== undefined;
    const hadFocus = list.contains(document.activeElement);
    path.forEach((message, at) => {
      const view = this.#viewOf(message);
      if (list.children[at] !== view.element) list.insertBefore(view.element, list.children[at] ?? null);
      const isLast = at === path.length - 1;
      const progress = this.#chat.progressOf(message.id);
      view.update(message, { isLast, isBusy, progress, versions: this.#chat.versionsOf(message) });
    });
    if (path.length === 0) list.replaceChildren(emptyText());
    while (list.childElementCount > Math.max(path.length, 1)) list.lastElementChild.remove();
    if (hadFocus && !list.contains(document.activeElement)) list.lastElementChild.focus({ preventScroll: true });
    this.#follow();
  }

  #viewOf(message) {
    if (!this.#views.has(message.id)) this.#views.set(message.id, this.#newView(message));
    return this.#views.get(message.id);
  }

  #newView(message) {
    const chat = this.#chat;
    if (message.role === "tool") return new ToolView(message);
    if (message.role === "user") {
      this.#isFollowing = true;
      return new UserView(message, { edit: (one, text) => chat.edit(one, text) });
    }
    return new AnswerView(message, {
      follow: () => this.#follow(),
      showsThinking: () => chat.settings.showsThinking,
      retry: (one) => chat.retry(one),
      resume: (one) => chat.resume(one),
      sendResults: (one, texts) => chat.sendResults(one, texts),
    });
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.#root;
    this.#isFollowing = scrollHeight - scrollTop - clientHeight < NEAR_END;
    this.#newest.hidden = this.#isFollowing;
  }

  #follow() {
    if (this.#isFollowing) this.#goToEnd();
  }

  #goToEnd() {
    this.#isFollowing = true;
    this.#root.scrollTop = this.#root.scrollHeight;
  }
}

function emptyText() {
  return make("div", { class: "empty" },
    make("h3", {}, "Start a conversation"),
    make("p", {}, "Write a message below, or drop files of text into this window: they become part of the message."),
    make("p", {}, "Conversations are kept in this browser. The server stores none of them."));
}
