/** The connection to the server: its key, requests, and errors in words. */

import { askKey } from "./key_dialog.js";

const STORED_KEY = "graphcore.key"; // in sessionStorage alone, which ends with the tab

/** An error of a request, in words that say what to do. */
export class ServerError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string|null, retryAfter?: number|null}} [facts] status is 0 without an answer
   */
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.name = "ServerError";
    Object.assign(this, { status, code, retryAfter });
  }
}

/** Sends requests with the key, which it asks for once. Event "key": the key has changed. */
export class Session extends EventTarget {
  #key = storedKey();
  #asking = null;
  #wasDeclined = false;

  /** @returns {string|null} the key, if one was given */
  get key() {
    return this.#key;
  }

  /** @returns {boolean} true if the server wants a key and none was given */
  get needsKey() {
    return this.#wasDeclined;
  }

  /**
   * Asks for JSON.
   * @param {string} path relative to the page, such as "status"
   * @param {{signal?: AbortSignal}} [options]
   * @returns {Promise<any>}
   * @throws {ServerError}
   */
  async get(path, { signal } = {}) {
    const response = await this.#answer(path, { signal }, false);
    try {
      return await response.json();
    } catch (error) {
      if (isCancelled(signal)) throw error;
      throw new ServerError(signal?.aborted ? UNREACHABLE : NO_JSON, { status: response.status });
    }
  }

  /**
   * Sends JSON for the person who uses the page.
   * @param {string} path
   * @param {object} body
   * @param {{signal?: AbortSignal, headers?: Object<string, string>}} [options]
   * @returns {Promise<Response>} a good answer
   * @throws {ServerError}
   */
  post(path, body, { signal, headers } = {}) {
    const sent = { "Content-Type": "application/json", ...headers };
    return this.#answer(path, { method: "POST", body: JSON.stringify(body), headers: sent, signal }, true);
  }

  /**
   * Asks for the key until the server takes it; one dialog at a time.
   * @returns {Promise<boolean>} false if the person has closed the dialog
   */
  async enterKey() {
    this.#asking ??= askKey((key) => this.#isTaken(key), this.#key !== null).finally(() => (this.#asking = null));
    const key = await this.#asking;
    this.#wasDeclined = key === null;
    if (key !== null) this.#keep(key);
    this.dispatchEvent(new Event("key"));
    return key !== null;
  }

  #keep(key) {
    this.#key = key;
    try {
      sessionStorage.setItem(STORED_KEY, key);
    } catch {
      // the browser keeps nothing for this page: the key lasts until it is reloaded
    }
  }

  async #answer(path, options, isWished) {
    const response = await this.#fetch(path, options, this.key);
    if (response.ok) return response;
    if (response.status === 401 && (isWished || !this.#wasDeclined) && (await this.enterKey())) {
      const second = await this.#fetch(path, options, this.key);
      if (second.ok) return second;
      throw await errorOf(second);
    }
    throw await errorOf(response);
  }

  async #fetch(path, options, key) {
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    try {
      return await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
    } catch (error) {
      if (isCancelled(options.signal)) throw error;
      throw new ServerError(UNREACHABLE);
    }
  }

  async #isTaken(key) {
    const response = await this.#fetch("v1/models", {}, key);
    return response.status !== 401;
  }
}

/** Returns whether the page itself has given a request up, which is not so if its time was over. */
function isCancelled(signal) {
  return signal?.aborted && signal.reason?.name !== "TimeoutError";
}

function storedKey() {
  try {
    return sessionStorage.getItem(STORED_KEY);
  } catch {
    return null; // the browser keeps nothing for this page
  }
}

const UNREACHABLE = "The server cannot be reached. Check that it is running, and the network; then try again.";
const NO_JSON =
  "The server's answer is no JSON: something else has answered, such as a proxy or a page to log in. Reload the page.";
const TOO_LONG = "The conversation is longer than the model can read. Start a new one, or remove files.";
const ADVICE = {
  401: "The server needs its key. Enter it, and try again.",
  403: "The server refuses this page's address.",
  404: "The server does not know this path. Its version may be older than the page: reload the page.",
  408: "The request took too long to arrive. Try again.",
  413: "The message is too large for the server. Remove a file, or shorten it.",
  429: "The server is busy: its queue is full.",
  500: "The request has failed inside the server. Try again; if it fails again, look into the server's log.",
  502: "The proxy before the server got no answer. Check that the server is running.",
  503: "The server takes no requests at present. Try again later.",
  504: "The proxy before the server waited too long. Try again.",
};

/**
 * Returns the error of an answer.
 * @param {Response} response
 * @returns {Promise<ServerError>}
 */
async function errorOf(response) {
  const text = await response.text().catch(() => "");
  const given = Number(response.headers.get("Retry-After"));
  return errorFrom(parsedError(text), response.status, given > 0 ? given : null);
}

/**
 * Returns the error that a body or an event of a stream has.
 * @param {{message?: string, code?: string|null, type?: string}} found
 * @param {number} status
 * @param {number|null} [retryAfter] seconds
 * @returns {ServerError}
 */
export function errorFrom(found, status, retryAfter = null) {
  const detail = typeof found.message === "string" ? found.message.slice(0, 2000) : "";
  const facts = { status, code: found.code ?? null, retryAfter };
  return new ServerError(wordsFor(detail, facts), facts);
}

function wordsFor(detail, { status, code, retryAfter }) {
  const said = detail ? ` The server says: ${detail}${/[.!?]$/.test(detail) ? "" : "."}` : "";
  if (code === "context_length_exceeded") {
    return `${TOO_LONG}${said}`;
  }
  if (status === 429) return `${ADVICE[429]} Try again in ${retryAfter ?? "a few"} seconds.${said}`;
  if (ADVICE[status]) return `${ADVICE[status]}${status === 401 ? "" : said}`;
  if (status === 400) return `The server refuses the request. Check the settings.${said}`;
  return `The server answered with status ${status}.${said}`;
}

function parsedError(text) {
  try {
    return JSON.parse(text).error ?? {};
  } catch {
    return {}; // a proxy's page, of no use here
  }
}
