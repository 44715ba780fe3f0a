/** One answer that is being made: the request, its stream, and what the server's status says of it. */

import { newId } from "./dom.js";
import { isLeaving } from "./leaving.js";
import { serverEvents } from "./server_events.js";
import { errorFrom, ServerError } from "./session.js";

const SAVE_MILLISECONDS = 400;
const STATUS_MILLISECONDS = 250;
const NO_EVENTS =
  "The answer cannot be read: it has not the form of OpenAI's interface. Check that no proxy changes what the server sends.";
const WORK_MILLISECONDS = 12; // longest stretch of reading before the page may draw and listen

/**
 * Makes an answer. Event "change": the message or `progress` has changed.
 *
 * `progress.phase` is loading, sending, waiting (with `place` in the queue), prefill (`computed` of `promptTokens`) or
 * decode (`newTokens`, `tokensPerSecond`).
 */
export class AnswerRun extends EventTarget {
  progress = { phase: "sending" };
  #abort = new AbortController();
  #requestId = `page-${newId()}`;
  #timer = 0; // of the next save
  #isLooking = false;
  #usage = null;
  #finishReason = null;
  #seenTokens = 0; // new tokens, as the server's status had them last
  #before; // statistics of the part that is continued
  #times = { sent: 0, first: 0, last: 0 };

  /**
   * @param {{session: Session, health: HealthWatch, store: ConversationStore}} services
   * @param {Message} message the answer, which grows
   * @param {object} body of the request
   */
  constructor(services, message, body) {
    super();
    Object.assign(this, services, { message, body });
    this.#before = message.statistics;
    Object.assign(message, { state: "running", error: null, statistics: null });
  }

  /** Makes the answer; its end, and its error if it fails, are in the message. */
  async run() {
    const { message } = this;
    await this.save();
    try {
      await this.health.untilLoaded(this.#waiting("loading"));
      await this.#stream(await this.#send());
      message.state = "done";
    } catch (error) {
      this.#fail(error);
    }
    message.statistics = this.#statistics();
    this.progress = null;
    this.#changed();
    await this.save();
  }

  /** Ends the answer as it is. */
  stop() {
    this.#abort.abort();
  }

  /** Keeps the message as it is now. */
  save() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    return this.store.saveMessage(this.message);
  }

  #waiting(phase) {
    this.#progressed({ phase });
    return this.#abort.signal;
  }

  /** Sends the request; if the server begins to load the model meanwhile, again after that. */
  async #send() {
    this.#progressed({ phase: "sending" });
    this.#times.sent = performance.now();
    const options = { signal: this.#abort.signal, headers: { "X-Request-ID": this.#requestId } };
    try {
      return await this.#withStatus(() => this.session.post("v1/chat/completions", this.body, options));
    } catch (error) {
      if (error.status !== 503) throw error;
      await this.health.look();
      if (this.health.state !== "loading" && this.health.state !== "rebuilding") throw error;
      await this.health.untilLoaded(this.#waiting("loading"));
      return this.#send();
    }
  }

  async #stream(response) {
    const kind = response.headers.get("Content-Type") ?? "";
    if (/html|json/i.test(kind)) throw new ServerError(`${NO_EVENTS} It sent ${kind.slice(0, 100)}.`);
    await this.#withStatus(async () => {
      let began = performance.now();
      for await (const data of serverEvents(response.body)) {
        if (data === "[DONE]") return;
        this.#take(chunkOf(data));
        if (performance.now() - began < WORK_MILLISECONDS) continue;
        await nextTask();
        began = performance.now();
      }
      throw new ServerError("The connection broke off before the answer was complete.");
    });
  }

  #take(chunk) {
    if (chunk.error) throw errorFrom(chunk.error, 500);
    if (chunk.usage) this.#usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.#finishReason = choice.finish_reason;
    if (!addDelta(this.message, choice.delta ?? {})) return;
    this.#times.last = performance.now();
    this.#times.first ||= this.#times.last;
    this.#timer ||= setTimeout(() => this.save(), SAVE_MILLISECONDS);
    if (this.progress.phase === "decode") this.#changed();
    else this.#progressed({ phase: "decode", newTokens: null, tokensPerSecond: null });
  }

  /** Does some work, and asks meanwhile for the server's status. */
  async #withStatus(work) {
    const timer = setInterval(() => this.#look(), STATUS_MILLISECONDS);
    try {
      return await work();
    } finally {
      clearInterval(timer);
    }
  }

  async #look() {
    if (this.#isLooking || document.visibilityState !== "visible") return;
    this.#isLooking = true;
    try {
      const { requests = [] } = await this.session.get("status?events=0", { signal: this.#abort.signal });
      const own = requests.find(({ id }) => String(id).startsWith(this.#requestId));
      if (!own || !this.progress) return;
      this.#seenTokens = own.new_tokens;
      this.#progressed(progressOf(own, requests));
    } catch {
      // the answer itself says what fails
    } finally {
      this.#isLooking = false;
    }
  }

  #progressed(progress) {
    this.progress = progress;
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }

  #fail(error) {
    const { message } = this;
    if (this.#abort.signal.aborted) {
      message.state = "stopped";
      return;
    }
    if (isLeaving()) {
      message.state = "interrupted";
      return;
    }
    message.state = "failed";
    const isKnown = error instanceof ServerError;
    const words = this.#times.first ? "The connection broke off before the answer was complete." : String(error);
    message.error = { text: isKnown ? error.message : words, status: error.status ?? 0 };
  }

  #statistics() {
    const { first, last, sent } = this.#times;
    const newTokens = this.#usage?.completion_tokens ?? this.#seenTokens;
    const seconds = (last - first) / 1000;
    return {
      promptTokens: this.#usage?.prompt_tokens ?? null,
      cachedTokens: this.#usage?.prompt_tokens_details?.cached_tokens ?? 0,
      newTokens: newTokens + (this.#before?.newTokens ?? 0),
      contextTokens: this.#usage ? this.#usage.prompt_tokens + this.#usage.completion_tokens : null,
      tokensPerSecond: newTokens > 1 && seconds > 0 ? (newTokens - 1) / seconds : null,
      firstTokenSeconds: first ? (first - sent) / 1000 : null,
      finishReason: this.#finishReason,
    };
  }
}

/** Returns the chunk that an event has. */
function chunkOf(data) {
  try {
    const chunk = JSON.parse(data);
    if (chunk !== null && typeof chunk === "object") return chunk;
  } catch {
    // as below
  }
  throw new ServerError(`${NO_EVENTS} It sent ${JSON.stringify(data.slice(0, 100))}.`);
}

/** Adds what a chunk of a stream brings; returns false if that is nothing. */
function addDelta(message, delta) {
  const thinking = delta.reasoning_content ?? delta.reasoning ?? "";
  message.thinking += thinking;
  message.content += delta.content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = (message.toolCalls[index ?? 0] ??= { id: "", name: "", args: "" });
    if (id) call.id = id;
    call.name += called?.name ?? "";
    call.args += called?.arguments ?? "";
  }
  return Boolean(thinking || delta.content || delta.tool_calls?.length);
}

function progressOf(own, requests) {
  if (own.state === "waiting") {
    const waiting = requests.filter(({ state }) => state === "waiting");
    return { phase: "waiting", place: waiting.indexOf(own) + 1 };
  }
  const promptTokens = own.prompt_tokens;
  if (own.state === "prefill") {
    return { phase: "prefill", computed: Math.min(own.computed_tokens, promptTokens), promptTokens };
  }
  const tokensPerSecond = own.decode_seconds > 0 ? own.new_tokens / own.decode_seconds : null;
  return { phase: "decode", newTokens: own.new_tokens, tokensPerSecond };
}

/** Lets the page draw and listen; unlike a timer, it is not slowed down in the background. */
function nextTask() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => (port1.close(), resolve());
    port2.postMessage(null);
  });
}
