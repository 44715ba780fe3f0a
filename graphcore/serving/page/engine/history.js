// The last minute of polls, from which rates are computed as differences.

const SECONDS = 60;

/** Samples of /status by the server's clock. */
export class History {
  /** @type {object[]} */
  samples = [];

  /**
   * Adds an answer; one of another run of the engine starts anew.
   * @param {object} status answer of /status
   */
  add(status) {
    const sample = { time: status.time, totals: status.totals, moved: movedOf(status.streaming) };
    const last = this.samples.at(-1);
    const isNewRun = sample.time < last?.time || sample.totals.new_tokens < last?.totals.new_tokens;
    if (isNewRun) this.samples = [];
    if (this.samples.at(-1)?.time === sample.time) return;
    this.samples.push(sample);
    while (this.samples[0].time < sample.time - SECONDS) this.samples.shift();
  }

  /**
   * Returns the increase per second of a total over the last seconds; null with fewer than two samples.
   * @param {(sample: object) => number} total
   * @param {number} seconds
   * @returns {number | null}
   */
  rate(total, seconds) {
    const last = this.samples.at(-1);
    const first = this.#before(seconds);
    return first === undefined || first === last ? null : (total(last) - total(first)) / (last.time - first.time);
  }

  /**
   * Returns what moved in the last seconds, or since the last look before them; null if that is not known.
   * @param {number} seconds
   * @returns {(import("./link.js").Moved & {seconds: number}) | null} seconds: the time that it is for
   */
  moved(seconds) {
    const last = this.samples.at(-1)?.moved ?? null;
    const before = this.#before(seconds);
    const first = before?.moved ?? null;
    if (last === null || first === null || last === first) return null;
    const grown = Object.keys(last).map((key) => [key, Math.max(0, last[key] - first[key])]);
    return { ...Object.fromEntries(grown), seconds: this.samples.at(-1).time - before.time };
  }

  /**
   * Returns the rate at every sample, over the seconds before it, for a line.
   * @param {(sample: object) => number} total
   * @param {number} seconds
   * @returns {number[]}
   */
  line(total, seconds) {
    let from = 0;
    return this.samples.slice(1).map((sample, index) => {
      while (this.samples[from].time < sample.time - seconds && from < index) from += 1;
      const first = this.samples[from];
      return (total(sample) - total(first)) / (sample.time - first.time);
    });
  }

  #before(seconds) {
    const last = this.samples.at(-1);
    return this.samples.findLast((sample) => sample.time <= last.time - seconds) ?? this.samples[0];
  }
}

/**
 * Returns the totals of what moved since the start; null if nothing streams.
 * @param {object | null} streaming `streaming` of /status
 * @returns {import("./link.js").Moved | null}
 */
export function movedOf(streaming) {
  if (streaming === null || streaming === undefined) return null;
  return {
    bytes: streaming.bytes,
    copySeconds: streaming.copy_seconds,
    hiddenSeconds: streaming.hidden_seconds,
    stallSeconds: streaming.stall_seconds,
  };
}
