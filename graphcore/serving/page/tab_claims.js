/** Which tab makes an answer: tabs ask each other. */

const CHANNEL = "graphcore.answers";
const REPLY_MILLISECONDS = 300;

/**
 * Event "stop": another tab wishes that this one ends an answer (`detail` is its id). Event "left": another tab was
 * closed, or loads the page again.
 */
export class TabClaims extends EventTarget {
  #channel = new BroadcastChannel(CHANNEL);
  #waiting = new Map();

  /** @param {(messageId: string) => boolean} isMine whether this tab makes an answer */
  constructor(isMine) {
    super();
    this.#channel.addEventListener("message", ({ data: { type, messageId } }) => {
      if (type === "who" && isMine(messageId)) this.#channel.postMessage({ type: "mine", messageId });
      if (type === "mine") this.#waiting.get(messageId)?.(true);
      if (type === "left") this.dispatchEvent(new Event("left"));
      if (type === "stop") this.dispatchEvent(new CustomEvent("stop", { detail: messageId }));
    });
    window.addEventListener("pagehide", () => this.#channel.postMessage({ type: "left" }));
  }

  /**
   * Returns whether another tab makes an answer.
   * @param {string} messageId
   * @returns {Promise<boolean>}
   */
  async isElsewhere(messageId) {
    const reply = new Promise((resolve) => {
      this.#waiting.set(messageId, resolve);
      setTimeout(() => resolve(false), REPLY_MILLISECONDS);
    });
    this.#channel.postMessage({ type: "who", messageId });
    return reply.finally(() => this.#waiting.delete(messageId));
  }

  /**
   * Asks the tab that makes an answer to end it.
   * @param {string} messageId
   */
  stopElsewhere(messageId) {
    this.#channel.postMessage({ type: "stop", messageId });
  }
}
