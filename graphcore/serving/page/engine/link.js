// The link over which weights arrive: its rate beside the measured ceiling, and how much of the copying costs no time.

import { make, makeSection, setAttribute, setText } from "./elements.js";
import { inPercent, inRate, inTime } from "./words.js";

/**
 * @typedef {{bytes: number, copySeconds: number, hiddenSeconds: number, stallSeconds: number}} Moved
 *     what moved in an interval; copySeconds: time in which at least one copy ran
 */

/**
 * Returns the panel of the link.
 * @returns {{section: HTMLElement, setPlan: (plan: object) => void,
 *     update: (now: Moved | null, all: Moved | null, words: string) => void}}
 *     now: a short interval; all: the whole time; words: name of the short interval
 */
export function makeLink() {
  const rate = make("strong", { class: "engine-figure" });
  const when = make("span", { class: "engine-note" });
  const fill = make("i", { class: "engine-meter-fill" });
  const meter = make("div", { class: "engine-meter", role: "meter", "aria-label": "Rate of the link" }, fill);
  setAttribute(meter, "aria-valuemin", "0");
  const ceiling = make("p", { class: "engine-note" });
  const hidden = makeFact("Copying hidden behind computing");
  const waited = makeFact("Time spent waiting for bytes");
  const facts = make("dl", { class: "engine-facts" }, hidden.box, waited.box);
  const headline = make("p", { class: "engine-headline" }, rate, when);
  const section = makeSection("panel-link", "Reading weights", headline, meter, ceiling, facts);
  let most = null;
  return {
    section,
    setPlan(plan) {
      section.hidden = plan.streaming.groups === 0 && plan.streaming.expert_slots === 0;
      most = plan.link_bytes_per_second;
      meter.hidden = most === null;
      setText(ceiling, ceilingWords(most));
    },
    update(now, all, words) {
      const isMoving = now !== null && now.copySeconds > 0;
      const moved = isMoving ? now : all;
      const found = moved !== null && moved.copySeconds > 0 ? moved.bytes / moved.copySeconds : null;
      setText(rate, found === null ? "Nothing has moved" : inRate(found));
      const idle = found === null ? "" : `while copying, on average; nothing moved ${words}`;
      setText(when, isMoving ? `while copying, ${words}` : idle);
      showMeter(meter, fill, found ?? 0, most);
      setText(hidden.value, shareWords(moved));
      setText(waited.value, waitedWords(now, all, words));
    },
  };
}

function makeFact(name) {
  const value = make("dd");
  return { value, box: make("div", {}, make("dt", { text: name }), value) };
}

function showMeter(meter, fill, rate, most) {
  if (most === null) return;
  setAttribute(meter, "aria-valuemax", String(Math.round(most)));
  setAttribute(meter, "aria-valuenow", String(Math.round(Math.min(rate, most))));
  setAttribute(meter, "aria-valuetext", `${inRate(rate)} of ${inRate(most)}`);
  fill.style.width = `${100 * Math.min(1, rate / most)}%`;
}

function ceilingWords(most) {
  if (most === null) return "The link's ceiling has not been measured.";
  return `The ceiling is ${inRate(most)}, measured with nothing else running.`;
}

function shareWords(moved) {
  if (moved === null || moved.copySeconds <= 0) return "nothing was copied yet";
  return `${inPercent(Math.min(1, moved.hiddenSeconds / moved.copySeconds))} of ${inTime(moved.copySeconds)}`;
}

function waitedWords(now, all, words) {
  const whole = all === null ? "" : `${inTime(all.stallSeconds)} in all`;
  const recent = now === null ? "" : `${inTime(now.stallSeconds)} ${words}`;
  return [recent, whole].filter(Boolean).join(", ");
}
