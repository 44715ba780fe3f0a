/** New messages of each role. */

import { newId } from "./dom.js";

/**
 * @param {string} conversationId
 * @param {string} parentId id of the message before, or "" for the first
 * @param {{text: string, files: {name: string, size: number, text: string}[]}} draft
 * @returns {Message}
 */
export function userMessage(conversationId, parentId, { text, files }) {
  return { ...head("user", conversationId, parentId), text, files };
}

/**
 * @param {string} conversationId
 * @param {string} parentId
 * @returns {Message} an answer; `state` is running, done, stopped, interrupted or failed, and `statistics` are set at
 *   its end
 */
export function assistantMessage(conversationId, parentId) {
  const texts = { content: "", thinking: "", toolCalls: [] };
  return { ...head("assistant", conversationId, parentId), ...texts, state: "running", error: null, statistics: null };
}

/**
 * @param {string} conversationId
 * @param {string} parentId
 * @param {{id: string, name: string}} call
 * @param {string} text what the tool has returned
 * @returns {Message}
 */
export function toolMessage(conversationId, parentId, call, text) {
  return { ...head("tool", conversationId, parentId), callId: call.id, name: call.name, text };
}

function head(role, conversationId, parentId) {
  return { id: newId(), conversationId, parentId, role, createdAt: Date.now() };
}
