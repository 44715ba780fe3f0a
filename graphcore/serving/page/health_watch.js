/** Watches whether the server answers and its model is ready. */

import { isLeaving } from "./leaving.js";

const CALM_MILLISECONDS = 10_000; // between two looks while all is well
const LOADING_MILLISECONDS = 1_000;
const FIRST_RETRY_MILLISECONDS = 1_000;
const LAST_RETRY_MILLISECONDS = 30_000;
const LATEST_ANSWER_MILLISECONDS = 10_000;

/**
 * Event "state": `state` has changed. It is that of GET /health, or "connecting" before the first answer, or
 * "unreachable".
 */
export class HealthWatch extends EventTarget {
  state = "connecting";
  #failures = 0;
  #timer = 0;

  /** Begins to watch, also after the tab was in the background or the network away. */
  start() {
    document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && this.look());
    window.addEventListener("online", () => this.look());
    return this.look();
  }

  /** Looks now. */
  async look() {
    clearTimeout(this.#timer);
    const found = await currentState();
    const state = found === "unreachable" && isLeaving() ? this.state : found;
    this.#failures = state === "unreachable" ? this.#failures + 1 : 0;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.look(), this.#pause(state));
    if (state === this.state) return;
    this.state = state;
    this.dispatchEvent(new Event("state"));
  }

  #pause(state) {
    if (state === "unreachable") {
      return Math.min(FIRST_RETRY_MILLISECONDS * 2 ** (this.#failures - 1), LAST_RETRY_MILLISECONDS);
    }
    return state === "ready" ? CALM_MILLISECONDS : LOADING_MILLISECONDS;
  }

  /**
   * Waits while the model is being loaded.
   * @param {AbortSignal} signal
   * @returns {Promise<void>} when the state is another
   */
  untilLoaded(signal) {
    const isLoading = () => this.state === "loading" || this.state === "rebuilding";
    if (!isLoading()) return Promise.resolve();
    return new Promise((resolve, reject) => {
      const check = () => {
        if (isLoading()) return;
        this.removeEventListener("state", check);
        resolve();
      };
      this.addEventListener("state", check);
      signal.addEventListener("abort", () => (this.removeEventListener("state", check), reject(signal.reason)));
    });
  }
}

async function currentState() {
  try {
    const signal = AbortSignal.timeout(LATEST_ANSWER_MILLISECONDS);
    const response = await fetch("health", { cache: "no-store", signal });
    const { status } = await response.json();
    return typeof status === "string" ? status : "unreachable";
  } catch {
    return "unreachable";
  }
}
