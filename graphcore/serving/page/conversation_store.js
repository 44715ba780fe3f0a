/**
 * Conversations and their messages, kept in the browser and in step between its tabs.
 *
 * Each message is a record of its own that names the one before it, so that two tabs which write at once make two
 * versions of an answer, and none overwrites the other's.
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} updatedAt milliseconds since 1970
 * @property {object} settings
 * @property {Object<string, string>} chosen for a message, or "" for the beginning, the version that is shown after it
 *
 * @typedef {object} Message with further fields of its role: see new_messages.js
 * @property {string} id
 * @property {string} conversationId
 * @property {string} parentId the message before, or ""
 * @property {"user"|"assistant"|"tool"} role
 * @property {number} createdAt milliseconds since 1970
 */

import { kept, openDatabase, resultOf } from "./database.js";

const CHANNEL = "graphcore.conversations";
const LEFT_DRAFT = "graphcore.draft"; // in sessionStorage: what was typed last before the page was left

/**
 * Events: "conversations" (the list has changed, `detail` is the conversation's id), "deleted" (`detail` is the
 * conversation's id), "imported" (`detail` is a list of conversations' ids), "message" (another tab has changed one,
 * `detail` is its id and conversation), "failed" (`detail` is an error: nothing is kept).
 */
export class ConversationStore extends EventTarget {
  #database;
  #channel = new BroadcastChannel(CHANNEL);
  #deleted = new Set(); // ids of conversations, in which nothing is kept any more

  /** @param {IDBDatabase|null} database */
  constructor(database) {
    super();
    this.#database = database;
    this.#channel.addEventListener("message", ({ data }) => this.#emit(data.type, data.detail));
  }

  /** @returns {Promise<ConversationStore>} */
  static async open() {
    const database = await openDatabase();
    const store = new ConversationStore(database ?? (await import("./memory_database.js")).memoryDatabase());
    store.isKept = database !== null;
    return store;
  }

  /** @returns {Promise<Conversation[]>} newest first */
  async conversations() {
    const found = await resultOf(this.#stores("readonly", "conversations").conversations.getAll());
    return found.sort((one, other) => other.updatedAt - one.updatedAt);
  }

  /**
   * @param {string} id
   * @returns {Promise<Conversation|undefined>}
   */
  conversation(id) {
    return resultOf(this.#stores("readonly", "conversations").conversations.get(id));
  }

  /**
   * @param {string} conversationId
   * @returns {Promise<Message[]>} oldest first
   */
  async messages(conversationId) {
    const { messages } = this.#stores("readonly", "messages");
    const found = await resultOf(messages.index("conversationId").getAll(conversationId));
    return found.sort((one, other) => one.createdAt - other.createdAt);
  }

  /**
   * @param {string} id
   * @returns {Promise<Message|undefined>}
   */
  message(id) {
    return resultOf(this.#stores("readonly", "messages").messages.get(id));
  }

  /**
   * Adds a conversation.
   * @param {Conversation} conversation
   */
  async addConversation(conversation) {
    await this.#write(["conversations"], ({ conversations }) => conversations.put(conversation));
    this.#tell("conversations", conversation.id);
  }

  /**
   * Adds conversations with their messages, all or none. One that is kept already stays as it is.
   * @param {Conversation[]} conversations
   * @param {Message[]} messages
   * @returns {Promise<number>} how many were added
   * @throws {Error} the browser keeps none of them
   */
  async addImported(conversations, messages) {
    let added = [];
    const isKept = await this.#write(["conversations", "messages"], async (stores) => {
      const keys = await Promise.all(conversations.map(({ id }) => resultOf(stores.conversations.getKey(id))));
      const fresh = conversations.filter((_, at) => keys[at] === undefined);
      const ids = new Set(fresh.map(({ id }) => id));
      for (const conversation of fresh) stores.conversations.put(conversation);
      for (const message of messages) if (ids.has(message.conversationId)) stores.messages.put(message);
      added = [...ids];
    }, false);
    if (!isKept) throw new Error("the browser has no room for it.");
    this.#tell("imported", added);
    return added.length;
  }

  /**
   * Changes a conversation, if it still exists.
   * @param {string} id
   * @param {(conversation: Conversation) => void} change
   */
  async changeConversation(id, change) {
    await this.#write(["conversations"], async ({ conversations }) => {
      const found = await resultOf(conversations.get(id));
      if (!found) return;
      change(found);
      conversations.put(found);
    });
    this.#tell("conversations", id);
  }

  /**
   * Keeps a message, unless its conversation was deleted. It is written at once: also a page that is left can do it.
   * @param {Message} message
   */
  async saveMessage(message) {
    if (this.#deleted.has(message.conversationId)) return;
    await this.#write(["messages"], ({ messages }) => messages.put(message));
    this.#tellOthers("message", { id: message.id, conversationId: message.conversationId });
  }

  /**
   * Removes a message.
   * @param {Message} message
   */
  async deleteMessage({ id, conversationId }) {
    await this.#write(["messages"], ({ messages }) => messages.delete(id));
    this.#tellOthers("message", { id, conversationId });
  }

  /**
   * Removes a conversation with its messages and its draft.
   * @param {string} id
   */
  async deleteConversation(id) {
    this.#deleted.add(id);
    await this.#write(["conversations", "messages", "drafts"], async ({ conversations, messages, drafts }) => {
      conversations.delete(id);
      drafts.delete(id);
      for (const key of await resultOf(messages.index("conversationId").getAllKeys(id))) messages.delete(key);
    });
    this.#tell("deleted", id);
  }

  /**
   * @param {string} id of a conversation, or "new"
   * @returns {Promise<{text: string, files: object[]}|undefined>}
   */
  async draft(id) {
    const left = leftDraft();
    const draft = await resultOf(this.#stores("readonly", "drafts").drafts.get(id));
    if (left?.id !== id) return draft;
    return { files: draft?.files ?? [], text: left.text };
  }

  /**
   * Keeps the text of a draft while the page is being left, which may be over before the database has written it.
   * @param {string} id of a conversation, or "new"
   * @param {string} text
   */
  leaveDraft(id, text) {
    try {
      sessionStorage.setItem(LEFT_DRAFT, JSON.stringify({ id, text }));
    } catch {
      // the browser keeps nothing for this page, or not so much: the database may have it
    }
  }

  /**
   * Keeps what is typed and not sent.
   * @param {string} id of a conversation, or "new"
   * @param {{text: string, files: object[]}} draft an empty one is removed
   */
  saveDraft(id, draft) {
    const isEmpty = draft.text === "" && draft.files.length === 0;
    if (leftDraft()?.id === id) forgetLeftDraft(); // it is older
    if (this.#deleted.has(id)) return Promise.resolve();
    return this.#write(["drafts"], ({ drafts }) => (isEmpty ? drafts.delete(id) : drafts.put({ ...draft, id })));
  }

  #stores(mode, ...names) {
    const transaction = this.#database.transaction(names, mode);
    return Object.fromEntries(names.map((name) => [name, transaction.objectStore(name)]));
  }

  /** Does some work in a transaction; returns false if nothing of it is kept. */
  async #write(names, work, isShown = true) {
    try {
      const transaction = this.#database.transaction(names, "readwrite");
      const end = kept(transaction);
      const working = work(Object.fromEntries(names.map((name) => [name, transaction.objectStore(name)])));
      if (!(working instanceof Promise)) transaction.commit?.(); // else a page that is left ends without it
      await Promise.all([working, end]);
      return true;
    } catch (error) {
      if (isShown) this.#emit("failed", error);
      return false;
    }
  }

  #tell(type, detail) {
    this.#tellOthers(type, detail);
    this.#emit(type, detail);
  }

  #tellOthers(type, detail) {
    this.#channel.postMessage({ type, detail });
  }

  #emit(type, detail) {
    if (type === "deleted") this.#deleted.add(detail);
    if (type === "imported") detail.forEach((id) => this.#deleted.delete(id)); // they are back
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

function leftDraft() {
  try {
    return JSON.parse(sessionStorage.getItem(LEFT_DRAFT));
  } catch {
    return null; // the browser keeps nothing for this page
  }
}

function forgetLeftDraft() {
  try {
    sessionStorage.removeItem(LEFT_DRAFT);
  } catch {
    // the browser keeps nothing for this page
  }
}
