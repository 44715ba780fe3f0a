/** What the server is asked: the shown messages and the settings as a body of /v1/chat/completions. */

import { settingsFields } from "./settings_values.js";
import { withFiles } from "./text_files.js";

/**
 * Returns the body for the answer after some messages.
 * @param {Message[]} path
 * @param {object} settings of the conversation
 * @returns {object}
 */
export function requestBody(path, settings) {
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  const messages = joinedUsers(path.filter(isTold).map(told));
  const last = path.at(-1);
  const continued = last?.role === "assistant" ? { continue_final_message: true, add_generation_prompt: false } : {};
  return {
    messages: [...system, ...messages].map(wellFormed),
    stream: true,
    stream_options: { include_usage: true },
    repetition_detection: true,
    ...continued,
    ...settingsFields(settings),
  };
}

/** Half of a surrogate pair, which a model may write, is no text for a server. */
function wellFormed(message) {
  const texts = Object.entries(message).filter(([, value]) => typeof value === "string");
  return { ...message, ...Object.fromEntries(texts.map(([name, text]) => [name, text.toWellFormed()])) };
}

/** An answer that failed before its first word is none. */
function isTold(message) {
  return message.role !== "assistant" || message.content !== "" || message.toolCalls.length > 0;
}

function told(message) {
  if (message.role === "user") return { role: "user", content: withFiles(message) };
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.text };
  const thinking = message.thinking ? { reasoning_content: message.thinking } : {};
  const calls = message.toolCalls.map(({ id, name, args }) => ({
    id, type: "function", function: { name, arguments: args || "{}" },
  }));
  return { role: "assistant", content: message.content, ...thinking, ...(calls.length ? { tool_calls: calls } : {}) };
}

/** Chat templates want one message for each turn. */
function joinedUsers(messages) {
  const joined = [];
  for (const message of messages) {
    const last = joined.at(-1);
    if (message.role === "user" && last?.role === "user") last.content += `\n\n${message.content}`;
    else joined.push(message);
  }
  return joined;
}
