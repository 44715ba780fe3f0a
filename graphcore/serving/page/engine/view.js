// The engine at work: what the server says about itself, four times a second while this is shown.

import { History, movedOf } from "./history.js";
import { Poller } from "./poller.js";
import { WhatIf } from "./what_if.js";
import { makeCache } from "./cache.js";
import { make, setText } from "./elements.js";
import { makeLanes } from "./lanes.js";
import { makeLayers } from "./layers.js";
import { makeLink } from "./link.js";
import { makeMemory } from "./memory.js";
import { makeRanks } from "./ranks.js";
import { makeRequests } from "./requests.js";
import { makeSlots } from "./slots.js";
import { makeStory } from "./story_panel.js";
import { newestPart } from "./passes.js";
import { story } from "./story.js";
import { counted } from "./words.js";

const MILLISECONDS = 250; // between two questions
const PATH = "status?events=600";
const LINK_SECONDS = 2; // interval of the link's rate
const SHORT_SECONDS = 2; // of a pass, which four looks a second cannot follow
const SNAPSHOTS =
  "A pass over the weights is short here, so layers and slots are snapshots, four in a second. The timeline shows " +
  "every step.";
const LATEST_MILLISECONDS = 15_000; // after which a question has no answer
const UNKNOWN =
  "The server's answer has not what this page expects: one of them may be of another version. Reload the page; if " +
  "this is said again, restart the server.";
const WAITING = {
  loading: "The model is being loaded. What the engine does is shown here as soon as it is ready.",
  rebuilding: "The engine is being loaded again after a failure. What it does is shown here as soon as it is ready.",
  draining: "The server is shutting down. It finishes the requests that run and takes no others.",
  failed: "The engine has failed and computes nothing. The server's log says why; start the server again.",
};

/**
 * Makes the view in an element.
 * @param {HTMLElement} root
 * @param {{get: (path: string) => Promise<object>}} session `get` returns parsed JSON or throws an Error with
 *     `message` and `status`
 * @returns {{show: () => void, hide: () => void}} functions that start and stop asking the server
 */
export function startEngineView(root, session) {
  const view = new EngineView(root, session);
  const poller = new Poller(() => view.poll(), MILLISECONDS);
  return { show: () => poller.start(), hide: () => poller.stop() };
}

/** The panels, and the last answers that they show. */
class EngineView {
  #session;
  #plan = null;
  #uptime = 0; // of the server; a smaller one is that of a server that was started again
  #history = new History();
  #content = make("div", { class: "engine-content", hidden: true });
  #notice = make("p", { class: "engine-notice", role: "status", text: "Asking the server." });
  #story = makeStory();
  #layers = makeLayers();
  #slots = makeSlots();
  #snapshots = make("p", { class: "engine-note", hidden: true, text: SNAPSHOTS });
  #lanes = makeLanes();
  #link = makeLink();
  #memory = makeMemory();
  #cache = makeCache();
  #ranks = makeRanks();
  #requests = makeRequests();
  #whatIf;

  constructor(root, session) {
    this.#session = session;
    this.#whatIf = new WhatIf((path, options) => session.get(path, options));
    const two = make("div", { class: "engine-two" }, this.#link.section, this.#memory.section);
    this.#slots.section.append(this.#snapshots);
    this.#content.append(this.#story.element, this.#layers.section, this.#slots.section, this.#lanes.section, two);
    this.#content.append(this.#ranks.section, this.#cache.section, this.#requests.section, this.#whatIf.section);
    root.append(make("div", { class: "engine-view" }, this.#notice, this.#content));
  }

  /** Asks once and shows the answer. Returns whether there was one. */
  async poll() {
    try {
      const status = await this.#session.get(PATH, { signal: AbortSignal.timeout(LATEST_MILLISECONDS) });
      if (status.state !== "ready" && !(status.state in WAITING)) throw new TypeError(`state ${status.state}`);
      const isOtherRun = status.uptime_seconds < this.#uptime || status.model !== this.#plan?.model;
      if (isOtherRun || (status.state !== "ready" && status.state !== "draining")) this.#plan = null;
      this.#uptime = status.uptime_seconds;
      if (this.#plan === null && status.state === "ready") await this.#load();
      this.#show(status);
      return true;
    } catch (error) {
      const last = this.#plan === null ? "" : " The values below are its last ones.";
      const isAnswer = error.status === undefined; // which could not be shown
      this.#say(isAnswer ? UNKNOWN : `The server gives no answer; this page asks again. ${error.message}${last}`);
      if (isAnswer) console.warn(error);
      this.#content.classList.add("is-stale");
      return false;
    }
  }

  async #load() {
    const plan = await this.#session.get("plan");
    const planned = [this.#layers, this.#slots, this.#lanes, this.#link, this.#memory, this.#whatIf];
    for (const panel of planned) panel.setPlan(plan);
    this.#plan = plan;
    this.#history = new History();
    this.#content.hidden = false;
  }

  #show(status) {
    this.#say(WAITING[status.state] ?? "");
    this.#content.classList.toggle("is-stale", this.#plan === null);
    if (this.#plan === null) return;
    const streaming = status.streaming;
    this.#history.add(status);
    this.#story.update(story(this.#plan, streaming));
    this.#layers.update(streaming);
    this.#slots.update(streaming);
    const moved = this.#history.moved(LINK_SECONDS);
    const seconds = Math.max(1, Math.round(moved?.seconds ?? LINK_SECONDS));
    this.#link.update(moved, movedOf(streaming), `in the last ${counted(seconds, "second")}`);
    this.#ranks.update(status.ring);
    this.#cache.update(status.kv_cache, status.requests);
    this.#requests.update(status, this.#history);
    if (streaming === null) return;
    const events = streaming.events;
    const part = events.length > 0 ? newestPart(events) : null;
    this.#lanes.update(events, part);
    this.#showPace(part);
  }

  #showPace(part) {
    const seconds = part === null ? Infinity : (part.end - part.begin) / part.borders.length;
    this.#snapshots.hidden = seconds > SHORT_SECONDS;
  }

  #say(text) {
    setText(this.#notice, text);
    this.#notice.hidden = text === "";
  }
}
