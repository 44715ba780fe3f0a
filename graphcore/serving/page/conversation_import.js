/** Conversations from an exported file. The file may come from anybody: what it has is checked field by field. */

import { FORMAT, VERSION } from "./conversation_export.js";
import { newId } from "./dom.js";
import { size, whole } from "./number_texts.js";
import { NO_SETTINGS, settingsErrors } from "./settings_values.js";

/** Bytes of the largest file that is read. */
export const LARGEST_BYTES = 64 * 2 ** 20;
const MOST_CONVERSATIONS = 10_000;
const MOST_MESSAGES = 100_000; // of all conversations
const LONGEST = 5_000; // messages of one, which are all drawn
const LONGEST_TITLE = 200;
const LATEST = 8.64e15; // milliseconds since 1970 that a date can have
const ENDS = ["done", "stopped", "interrupted", "failed"];
const COUNTS = ["promptTokens", "cachedTokens", "newTokens", "contextTokens", "tokensPerSecond", "firstTokenSeconds"];

/**
 * Returns the conversations and messages of an exported file. Messages get new ids, so that none of the file can take
 * the place of another.
 * @param {File} file
 * @returns {Promise<{conversations: Conversation[], messages: Message[]}>}
 * @throws {Error} a sentence: what is wrong, and where
 */
export async function importedConversations(file) {
  if (file.size > LARGEST_BYTES) throw new Error(`it has ${size(file.size)}, and at most ${size(LARGEST_BYTES)} are read.`);
  const { format, version, conversations } = objectOf(await jsonIn(file), "the file");
  if (format !== FORMAT) throw new Error("it is no export of conversations of this page.");
  if (version !== VERSION) throw new Error(`it has version ${String(version).slice(0, 20)}, and this page reads version 1.`);
  listOf(conversations, MOST_CONVERSATIONS, "the file", "conversations");
  const found = conversations.map((one, at) => conversationOf(one, `conversation ${at + 1}`));
  const messages = found.flatMap((one) => one.messages);
  if (messages.length > MOST_MESSAGES) {
    throw new Error(`it has ${whole(messages.length)} messages, and at most ${whole(MOST_MESSAGES)} are read.`);
  }
  checkIds(found.map(({ conversation }) => conversation.id), "conversations");
  return { conversations: found.map(({ conversation }) => conversation), messages };
}

async function jsonIn(file) {
  try {
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()));
  } catch {
    throw new Error("it is no JSON in UTF-8.");
  }
}

function conversationOf(value, where) {
  const { id, title, updatedAt, settings, chosen, messages } = objectOf(value, where);
  listOf(messages, LONGEST, where, "messages");
  const read = messages.map((one, at) => messageOf(one, `message ${at + 1} of ${where}`));
  checkIds(read.map((message) => message.id), `messages of ${where}`);
  const reached = reachedOf(read);
  const ids = new Map(reached.map((message) => [message.id, newId()])).set("", "");
  const conversation = {
    id: nameOf(id, where, "id"),
    title: textOf(title, where, "title").slice(0, LONGEST_TITLE),
    updatedAt: countOf(updatedAt, where, "updatedAt", LATEST),
    settings: settingsOf(objectOf(settings, `settings of ${where}`), where),
    chosen: Object.fromEntries(Object.entries(objectOf(chosen, `chosen of ${where}`))
      .filter((pair) => pair.every((one) => ids.has(one))).map((pair) => pair.map((one) => ids.get(one)))),
  };
  const renamed = (message) => ({ ...message, id: ids.get(message.id), parentId: ids.get(message.parentId) });
  return { conversation, messages: reached.map((message) => ({ ...renamed(message), conversationId: conversation.id })) };
}

/** Returns the settings that the page knows; others are left out. */
function settingsOf(given, where) {
  const known = Object.entries(NO_SETTINGS).filter(([name]) => Object.hasOwn(given, name));
  const wrong = known.find(([name, usual]) => typeof given[name] !== typeof usual);
  if (wrong) throw new Error(`the setting ${wrong[0]} of ${where} has the wrong type.`);
  const settings = { ...NO_SETTINGS, ...Object.fromEntries(known.map(([name]) => [name, given[name]])) };
  const [error] = Object.entries(settingsErrors(settings));
  if (error) throw new Error(`the setting ${error[0]} of ${where} is wrong. ${error[1]}`);
  return settings;
}

function messageOf(value, where) {
  const given = objectOf(value, where);
  const head = {
    id: nameOf(given.id, where, "id"),
    parentId: textOf(given.parentId, where, "parentId"),
    role: given.role,
    createdAt: countOf(given.createdAt, where, "createdAt", LATEST),
  };
  if (given.role === "user") {
    const files = listOf(given.files, MOST_MESSAGES, where, "files").map((file) => fileOf(file, where));
    return { ...head, text: textOf(given.text, where, "text"), files };
  }
  if (given.role === "tool") return { ...head, ...textsOf(given, where, "callId", "name", "text") };
  if (given.role === "assistant") return { ...head, ...answerOf(given, where) };
  throw new Error(`${where} has no role of user, assistant or tool.`);
}

function answerOf({ content, thinking, toolCalls, state, error, statistics }, where) {
  const calls = listOf(toolCalls, MOST_MESSAGES, where, "toolCalls");
  return {
    ...textsOf({ content, thinking }, where, "content", "thinking"),
    toolCalls: calls.map((call) => textsOf(objectOf(call, `a call of ${where}`), where, "id", "name", "args")),
    state: ENDS.includes(state) ? state : "interrupted",
    error: state === "failed" ? errorOf(objectOf(error, `error of ${where}`), where) : null,
    statistics: statistics === null ? null : statisticsOf(objectOf(statistics, `statistics of ${where}`), where),
  };
}

function errorOf({ text, status }, where) {
  return { text: textOf(text, where, "error"), status: countOf(status, where, "status") };
}

function statisticsOf(given, where) {
  const counts = COUNTS.map((name) => [name, given[name] == null ? null : countOf(given[name], where, name)]);
  const reason = given.finishReason == null ? null : textOf(given.finishReason, where, "finishReason");
  return { ...Object.fromEntries(counts), finishReason: reason };
}

function fileOf(value, where) {
  const { name, size: bytes, text } = objectOf(value, `a file of ${where}`);
  return { ...textsOf({ name, text }, where, "name", "text"), size: countOf(bytes, where, "size of a file") };
}

function textsOf(given, where, ...names) {
  return Object.fromEntries(names.map((name) => [name, textOf(given[name], where, name)]));
}

function objectOf(value, where) {
  if (typeof value === "object" && value !== null && !Array.isArray(value)) return value;
  throw new Error(`${where} is no JSON object.`);
}

function listOf(value, most, where, name) {
  if (!Array.isArray(value)) throw new Error(`${where} has no list of ${name}.`);
  if (value.length <= most) return value;
  throw new Error(`${where} has ${whole(value.length)} ${name}, and at most ${whole(most)} are read.`);
}

function textOf(value, where, name) {
  if (typeof value === "string") return value;
  throw new Error(`${name} of ${where} is no text.`);
}

function nameOf(value, where, name) {
  if (/^[\w-]{1,64}$/.test(textOf(value, where, name))) return value;
  throw new Error(`${name} of ${where} is not 1 to 64 letters and digits.`);
}

function countOf(value, where, name, most = Number.MAX_VALUE) {
  if (typeof value === "number" && value >= 0 && value <= most) return value;
  throw new Error(`${name} of ${where} is no number of 0 or more.`);
}

function checkIds(ids, what) {
  if (new Set(ids).size < ids.length) throw new Error(`two ${what} have the same id.`);
}

/** Returns the messages that come after another one of the conversation, or at its beginning: others are never shown. */
function reachedOf(messages) {
  const after = Map.groupBy(messages, ({ parentId }) => parentId);
  const found = [];
  for (let next = after.get("") ?? []; next.length; next = next.flatMap(({ id }) => after.get(id) ?? [])) {
    found.push(...next);
  }
  return found;
}
