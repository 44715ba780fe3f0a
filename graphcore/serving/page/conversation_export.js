/** Conversations as files: JSON, which can be imported again (conversation_import.js), and Markdown to read. */

import { make } from "./dom.js";
import { shownPath } from "./message_tree.js";
import { withFiles } from "./text_files.js";

/** First fields of an exported file, by which an import knows it. */
export const FORMAT = "graphcore.conversations";
export const VERSION = 1;

const FENCE = "~~~~";
const LONGEST_NAME = 60;

/**
 * Returns conversations with all versions of their messages, their settings, and nothing else: no draft and no key.
 * @param {ConversationStore} store
 * @param {Conversation[]} conversations
 * @returns {Promise<Blob>} JSON
 */
export async function jsonOf(store, conversations) {
  const parts = [`{"format": "${FORMAT}", "version": ${VERSION}, "conversations": [`];
  for (const [at, conversation] of conversations.entries()) {
    const messages = await store.messages(conversation.id);
    parts.push(at === 0 ? "\n" : ",\n", JSON.stringify({ ...conversation, messages }));
  }
  return new Blob([...parts, "\n]}\n"], { type: "application/json" });
}

/**
 * Returns the shown messages of a conversation, without the thinking.
 * @param {ConversationStore} store
 * @param {Conversation} conversation
 * @returns {Promise<Blob>} Markdown
 */
export async function markdownOf(store, { id, title, chosen }) {
  const path = shownPath(await store.messages(id), chosen);
  return new Blob([[`# ${title}`, ...path.map(section)].join("\n\n"), "\n"], { type: "text/markdown" });
}

function section(message) {
  if (message.role === "user") return `## User\n\n${withFiles(message)}`;
  if (message.role === "tool") return `## Result of ${message.name}\n\n${fenced(message.text)}`;
  const calls = message.toolCalls.map(({ name, args }) => `Calls the tool ${name}\n\n${fenced(args)}`);
  return ["## Assistant", message.content, ...calls].filter((text) => text !== "").join("\n\n");
}

function fenced(text) {
  let fence = FENCE;
  while (text.includes(fence)) fence += "~";
  return `${fence}\n${text}\n${fence}`;
}

/**
 * Gives a file to the person, as a download.
 * @param {Blob} blob
 * @param {string} title name of the file, in which only letters and digits of any script stay
 * @param {string} ending such as "json"
 */
export function download(blob, title, ending) {
  const name = title.normalize("NFC").replaceAll(/[^\p{L}\p{M}\p{N}]+/gu, "-").replaceAll(/^-|-$/g, "");
  const address = URL.createObjectURL(blob);
  make("a", { href: address, download: `${name.slice(0, LONGEST_NAME) || "conversation"}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000); // the browser may still read it
}
