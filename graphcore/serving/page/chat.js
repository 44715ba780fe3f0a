/** The open conversation: its messages, and what is done with them. */

import { AnswerRun } from "./answer_run.js";
import { announce, newId } from "./dom.js";
import { shownPath, versions } from "./message_tree.js";
import { assistantMessage, toolMessage, userMessage } from "./new_messages.js";
import { requestBody } from "./request_body.js";
import { defaultSettings, saveDefaultSettings } from "./settings_values.js";
import { TabClaims } from "./tab_claims.js";
import { counted } from "./number_texts.js";

const LONGEST_TITLE = 60;
const CLAIM_MILLISECONDS = 2_000; // between two questions whether the tab that makes an answer still lives

/**
 * Event "change": the conversation, its messages, or whether an answer is being made have changed.
 * Event "grown": an answer has grown (`detail` is the message), and nothing else has changed.
 * Event "opened": another conversation is shown. Event "begun": the new one has got its first message.
 * Event "gone": the conversation was deleted.
 */
export class Chat extends EventTarget {
  conversation = null; // null for a new one, which has no message yet
  settings = defaultSettings();
  isOpened = false;
  #services;
  #messages = [];
  #runs = new Map(); // of this tab, by the id of their message
  #claims = new TabClaims((id) => this.#runs.has(id));

  /** @param {{session: Session, health: HealthWatch, store: ConversationStore}} services */
  constructor(services) {
    super();
    this.#services = services;
    const { store } = services;
    store.addEventListener("message", ({ detail }) => this.#reload(detail));
    store.addEventListener("conversations", ({ detail }) => {
      if (detail === this.conversation?.id) this.#reloadConversation();
    });
    store.addEventListener("deleted", ({ detail }) => this.#deleted(detail));
    this.#claims.addEventListener("stop", ({ detail }) => this.#runs.get(detail)?.stop());
    this.#claims.addEventListener("left", () => this.#checkElsewhere());
    window.addEventListener("pagehide", () => this.#runs.forEach((run) => run.save()));
    setInterval(() => this.#checkElsewhere(), CLAIM_MILLISECONDS);
  }

  /** @returns {Message[]} the messages that are shown */
  get path() {
    return shownPath(this.#messages, this.conversation?.chosen ?? {});
  }

  /**
   * Returns the versions beside a message.
   * @param {Message} message
   * @returns {{ids: string[], at: number, choose: (id: string) => void}}
   */
  versionsOf({ id, parentId }) {
    const ids = versions(this.#messages, parentId).map((message) => message.id);
    return { ids, at: ids.indexOf(id), choose: (other) => this.#choose(parentId, other) };
  }

  /** @returns {Message|undefined} the shown answer that is being made, here or in another tab */
  get runningMessage() {
    return this.path.find(({ state }) => state === "running");
  }

  /**
   * Returns how far an answer is.
   * @param {string} messageId
   * @returns {object|null} null for one that another tab makes
   */
  progressOf(messageId) {
    return this.#runs.get(messageId)?.progress ?? null;
  }

  /** @returns {Set<string>} conversations that this tab answers in */
  get busyConversations() {
    return new Set(Array.from(this.#runs.values(), ({ message }) => message.conversationId));
  }

  /**
   * Opens a conversation.
   * @param {string|null} id null for a new one
   * @returns {Promise<boolean>} false if there is no such conversation
   */
  async open(id) {
    const { store } = this.#services;
    const conversation = id === null ? null : await store.conversation(id);
    if (conversation === undefined) return false;
    const messages = conversation ? await store.messages(id) : [];
    this.conversation = conversation;
    this.#messages = messages.map((message) => this.#runs.get(message.id)?.message ?? message);
    this.settings = conversation ? { ...defaultSettings(), ...conversation.settings } : defaultSettings();
    this.isOpened = true;
    this.dispatchEvent(new Event("opened"));
    this.#changed();
    await this.#checkElsewhere();
    return true;
  }

  /**
   * Sends a message.
   * @param {{text: string, files: object[]}} draft
   */
  async send(draft) {
    if (!this.conversation) await this.#begin(draft);
    const message = userMessage(this.conversation.id, this.path.at(-1)?.id ?? "", draft);
    await this.#add(message);
    await this.#answer(message.id);
  }

  /** Ends the answer that is shown and being made. */
  stop() {
    const running = this.runningMessage;
    if (!running) return;
    const run = this.#runs.get(running.id);
    if (run) run.stop();
    else this.#claims.stopElsewhere(running.id);
  }

  /**
   * Answers again; the earlier answer is kept as another version, unless it has nothing.
   * @param {Message} message an answer
   */
  async retry(message) {
    if (this.runningMessage) return;
    const isEmpty = !message.content && !message.thinking && message.toolCalls.length === 0;
    const isLast = this.#messages.every(({ parentId }) => parentId !== message.id);
    if (isEmpty && isLast) await this.#remove(message);
    await this.#answer(message.parentId);
  }

  /**
   * Sends another text instead of a user's message; the earlier one is kept as another version.
   * @param {Message} message
   * @param {string} text
   */
  async edit({ parentId, files }, text) {
    if (this.runningMessage) return;
    const message = userMessage(this.conversation.id, parentId, { text, files });
    await this.#add(message);
    await this.#answer(message.id);
  }

  /**
   * Goes on with an answer where it ended.
   * @param {Message} message
   */
  async resume(message) {
    if (!this.runningMessage) await this.#run(message);
  }

  /**
   * Sends what tools have returned.
   * @param {Message} answer the answer that called them
   * @param {string[]} texts
   */
  async sendResults(answer, texts) {
    let parentId = answer.id;
    for (const [at, text] of texts.entries()) {
      const message = toolMessage(this.conversation.id, parentId, answer.toolCalls[at], text);
      await this.#add(message);
      parentId = message.id;
    }
    await this.#answer(parentId);
  }

  /**
   * Keeps settings.
   * @param {object} settings
   * @param {boolean} isForAll true if new conversations begin with them, too
   */
  async saveSettings(settings, isForAll) {
    this.settings = settings;
    if (isForAll) saveDefaultSettings(settings);
    if (this.conversation) await this.#change((conversation) => (conversation.settings = settings));
    this.#changed();
  }

  async #begin({ text, files }) {
    const first = text.trim().split("\n", 1)[0] || files[0].name;
    const title = first.length > LONGEST_TITLE ? `${first.slice(0, LONGEST_TITLE - 1)}\u2026` : first;
    const conversation = { id: newId(), title, updatedAt: Date.now(), settings: this.settings, chosen: {} };
    this.conversation = conversation;
    await this.#services.store.addConversation(conversation);
    this.dispatchEvent(new Event("begun"));
  }

  async #add(message) {
    this.#messages.push(message);
    const choose = (conversation) => {
      conversation.chosen[message.parentId] = message.id;
      conversation.updatedAt = Date.now();
    };
    choose(this.conversation);
    this.#changed();
    await this.#services.store.saveMessage(message);
    await this.#change(choose);
  }

  async #remove(message) {
    this.#messages = this.#messages.filter(({ id }) => id !== message.id);
    await this.#services.store.deleteMessage(message);
  }

  async #answer(parentId) {
    const message = assistantMessage(this.conversation.id, parentId);
    await this.#add(message);
    await this.#run(message);
  }

  async #run(message) {
    const path = this.path;
    const shown = path.slice(0, path.indexOf(message) + 1);
    const told = message.content === "" ? shown.slice(0, -1) : shown;
    const run = new AnswerRun(this.#services, message, requestBody(told, this.settings));
    this.#runs.set(message.id, run);
    run.addEventListener("change", () => {
      if (message.state !== "running") this.#changed();
      else if (message.conversationId === this.conversation?.id) this.#grown(message);
    });
    this.#changed();
    await run.run();
    this.#runs.delete(message.id);
    this.#changed();
    announce(endAnnouncement(message));
  }

  async #choose(parentId, id) {
    const choose = (conversation) => (conversation.chosen[parentId] = id);
    choose(this.conversation);
    this.#changed();
    await this.#change(choose);
  }

  #change(change) {
    return this.#services.store.changeConversation(this.conversation.id, change);
  }

  /** Takes a message that another tab has changed. */
  async #reload({ id, conversationId }) {
    const message = await this.#services.store.message(id);
    if (conversationId === this.conversation?.id && !this.#runs.has(id)) this.#replace(id, message);
  }

  #replace(id, message) {
    const at = this.#messages.findIndex((one) => one.id === id);
    if (message === undefined) this.#messages = this.#messages.filter((one) => one.id !== id);
    else if (at >= 0) this.#messages[at] = message;
    else this.#messages.push(message);
    this.#changed();
  }

  async #reloadConversation() {
    const { id } = this.conversation;
    const found = await this.#services.store.conversation(id);
    if (!found || this.conversation?.id !== id) return;
    this.conversation = found;
    this.settings = { ...defaultSettings(), ...found.settings };
    this.#changed();
  }

  #deleted(conversationId) {
    for (const run of this.#runs.values()) if (run.message.conversationId === conversationId) run.stop();
    if (this.conversation?.id === conversationId) this.dispatchEvent(new Event("gone"));
  }

  /** Marks answers that nobody makes any more. */
  async #checkElsewhere() {
    const orphans = this.#messages.filter(({ id, state }) => state === "running" && !this.#runs.has(id));
    await Promise.all(orphans.map(async (message) => {
      if (await this.#claims.isElsewhere(message.id)) return;
      const latest = await this.#services.store.message(message.id);
      if (latest?.state !== "running" || this.#runs.has(message.id)) return;
      const ended = { ...latest, state: "interrupted" };
      await this.#services.store.saveMessage(ended);
      if (ended.conversationId === this.conversation?.id) this.#replace(ended.id, ended);
    }));
  }

  #grown(message) {
    this.dispatchEvent(new CustomEvent("grown", { detail: message }));
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

function endAnnouncement({ state, error, statistics }) {
  if (state === "failed") return `The answer failed. ${error.text}`;
  if (state === "stopped") return "The answer was stopped.";
  return `The answer is complete: ${counted(statistics.newTokens, "token")}.`;
}
