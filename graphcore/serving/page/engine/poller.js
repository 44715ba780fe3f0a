// Asks the server again and again while the page is visible: one question at a time, and more rarely after errors.

const SLOWEST = 5000; // milliseconds

/** A repeated question. */
export class Poller {
  #ask;
  #milliseconds;
  #isRunning = false;
  #isAsking = false;
  #timer = 0;
  #numErrors = 0;

  /**
   * @param {() => Promise<boolean>} ask asks once and returns whether there was an answer; it must not throw
   * @param {number} milliseconds time from the beginning of one question to that of the next
   */
  constructor(ask, milliseconds) {
    this.#ask = ask;
    this.#milliseconds = milliseconds;
    document.addEventListener("visibilitychange", () => this.#restart());
  }

  /** Starts asking, at once. */
  start() {
    this.#isRunning = true;
    this.#restart();
  }

  /** Asks no more. */
  stop() {
    this.#isRunning = false;
    clearTimeout(this.#timer);
  }

  #restart() {
    clearTimeout(this.#timer);
    if (this.#isRunning && !document.hidden && !this.#isAsking) this.#next();
  }

  async #next() {
    this.#isAsking = true;
    const began = performance.now();
    const isAnswered = await this.#ask();
    this.#isAsking = false;
    this.#numErrors = isAnswered ? 0 : this.#numErrors + 1;
    if (!this.#isRunning || document.hidden) return;
    const pause = Math.min(SLOWEST, this.#milliseconds * 2 ** this.#numErrors);
    this.#timer = setTimeout(() => this.#next(), Math.max(0, pause - (performance.now() - began)));
  }
}
