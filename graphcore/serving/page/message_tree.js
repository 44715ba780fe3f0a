/** The messages of a conversation as a tree: an edit or a retry is a further version beside the earlier one. */

/**
 * Returns the versions of what comes after a message, oldest first.
 * @param {Message[]} messages of a conversation, oldest first
 * @param {string} parentId
 * @returns {Message[]}
 */
export function versions(messages, parentId) {
  return messages.filter((message) => message.parentId === parentId);
}

/**
 * Returns the messages that are shown, from the first to the last.
 * @param {Message[]} messages of a conversation, oldest first
 * @param {Object<string, string>} chosen version after each message; the newest where none was chosen
 * @returns {Message[]}
 */
export function shownPath(messages, chosen) {
  const after = Map.groupBy(messages, (message) => message.parentId);
  const path = [];
  let last = "";
  while (after.has(last)) {
    const beside = after.get(last);
    const next = beside.find(({ id }) => id === chosen[last]) ?? beside.at(-1);
    after.delete(last);
    path.push(next);
    last = next.id;
  }
  return path;
}
