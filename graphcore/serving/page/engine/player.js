// A clock for a recorded run: play and pause, a scrubber, speed, and steps by pass.

import { make, setAttribute, setText } from "./elements.js";
import { inTime } from "./words.js";

const SPEEDS = [10, 5, 2, 1, 1 / 2, 1 / 5, 1 / 10, 1 / 20, 1 / 50, 1 / 100, 1 / 200, 1 / 500, 1 / 1000];
const PASS_SECONDS = 6; // time that a pass should take on the screen
const SCRUBBER_STEPS = 1000; // steps of the scrubber for one pass
const PLAYER_KEYS = "Arrow keys move in time, Page Up and Page Down go to the next and the previous pass, Space plays.";

/** The clock of a recorded run. */
export class Player {
  #begin;
  #end;
  #passes;
  #onTime;
  #time;
  #frame = 0;
  #before = 0; // time of the frame before, in milliseconds
  #play = make("button", { type: "button", class: "engine-button is-main", text: "Play" });
  #scrubber = make("input", { type: "range", "aria-label": "Time", "aria-describedby": "engine-keys" });
  #speed = make("select", { id: "engine-speed" });
  #words = make("output", { class: "engine-clock" });

  /**
   * @param {{begin: number, end: number, passes: {begin: number, end: number}[]}} run
   * @param {(time: number) => void} onTime called with each new time
   */
  constructor({ begin, end, passes }, onTime) {
    [this.#begin, this.#end, this.#passes, this.#onTime, this.#time] = [begin, end, passes, onTime, begin];
    const back = make("button", { type: "button", class: "engine-button", text: "Previous pass" });
    const on = make("button", { type: "button", class: "engine-button", text: "Next pass" });
    this.#makeSpeeds((end - begin) / passes.length);
    setAttribute(this.#scrubber, "min", "0");
    setAttribute(this.#scrubber, "max", String(end - begin));
    setAttribute(this.#scrubber, "step", String((end - begin) / (SCRUBBER_STEPS * passes.length)));
    this.#scrubber.value = "0";
    this.#play.addEventListener("click", () => this.#toggle());
    back.addEventListener("click", () => this.step(-1));
    on.addEventListener("click", () => this.step(1));
    this.#scrubber.addEventListener("input", () => this.seek(this.#begin + Number(this.#scrubber.value)));
    this.#scrubber.addEventListener("keydown", (press) => this.#key(press));
    const speed = make("label", { for: "engine-speed", text: "Speed" });
    const buttons = make("div", { class: "engine-buttons" }, this.#play, back, on, speed, this.#speed, this.#words);
    const isCoarse = matchMedia("(pointer: coarse)").matches; // a finger: what is said of keys does not help there
    const text = isCoarse ? "" : PLAYER_KEYS;
    const keys = make("p", { class: "engine-note", id: "engine-keys", text, hidden: isCoarse });
    this.element = make("div", { class: "engine-player", role: "group", "aria-label": "Player" });
    this.element.append(buttons, this.#scrubber, keys);
  }

  /** Time that is shown. */
  get time() {
    return this.#time;
  }

  /** Shows a time. */
  seek(time) {
    this.#time = Math.min(this.#end, Math.max(this.#begin, time));
    this.#scrubber.value = String(this.#time - this.#begin);
    const pass = this.#pass() + 1;
    const clock = `${inTime(this.#time - this.#begin)} of ${inTime(this.#end - this.#begin)}`;
    const words = `${clock}, pass ${pass} of ${this.#passes.length}`;
    setText(this.#words, words);
    setAttribute(this.#scrubber, "aria-valuetext", words);
    this.#onTime(this.#time);
  }

  /** Goes to the beginning of the next pass, or of the previous one with -1. */
  step(by) {
    const index = Math.min(this.#passes.length - 1, Math.max(0, this.#pass() + by));
    this.seek(this.#passes[index].begin);
  }

  #pass() {
    return Math.max(0, this.#passes.findLastIndex((pass) => pass.begin <= this.#time));
  }

  #makeSpeeds(seconds) {
    const chosen = SPEEDS.find((speed) => seconds / speed >= PASS_SECONDS) ?? SPEEDS.at(-1);
    for (const speed of SPEEDS) {
      const factor = speed > 1 ? `${speed} times faster` : `${Math.round(1 / speed)} times slower`;
      const words = speed === 1 ? "as it was" : factor;
      this.#speed.append(make("option", { value: speed, text: words, selected: speed === chosen }));
    }
  }

  #key(press) {
    const by = { PageUp: 1, PageDown: -1 }[press.key];
    if (by === undefined && press.key !== " ") return;
    press.preventDefault();
    if (by === undefined) this.#toggle();
    else this.step(by);
  }

  #toggle() {
    if (this.#frame !== 0) {
      this.#stop();
      return;
    }
    if (this.#time >= this.#end) this.seek(this.#begin);
    setText(this.#play, "Pause");
    this.#before = performance.now();
    this.#frame = requestAnimationFrame((now) => this.#next(now));
  }

  #stop() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    setText(this.#play, "Play");
  }

  #next(now) {
    this.seek(this.#time + (Math.max(0, now - this.#before) / 1000) * Number(this.#speed.value));
    this.#before = now;
    if (this.#time >= this.#end) this.#stop();
    else this.#frame = requestAnimationFrame((next) => this.#next(next));
  }
}
