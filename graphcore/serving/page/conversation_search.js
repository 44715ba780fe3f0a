/** Search over the titles and texts of all conversations. */

const BEFORE = 24; // characters of an excerpt before what was found
const AFTER = 80;

/**
 * Returns the conversations that have a text in their title or in any version of a message; case is ignored. Messages
 * are read conversation by conversation, so that the page goes on meanwhile, and has few of them in memory.
 * @param {ConversationStore} store
 * @param {string} wanted
 * @param {AbortSignal} signal ends the search
 * @returns {Promise<{conversation: Conversation, excerpt: string[]|null}[]>} newest first; an excerpt is a text before
 *   the place in a message, the place and the text after it, and null if the title alone has it
 */
export async function foundConversations(store, wanted, signal) {
  const found = [];
  const pattern = new RegExp(wanted.replaceAll(/[$()*+.?[\\\]^{|}]/g, "\\$&"), "iu");
  for (const conversation of await store.conversations()) {
    const texts = (await store.messages(conversation.id)).flatMap(textsOf);
    if (signal.aborted) break;
    const excerpt = excerptOf(texts, pattern);
    if (excerpt || pattern.test(conversation.title)) found.push({ conversation, excerpt });
  }
  return found;
}

function textsOf({ text = "", content = "", thinking = "", files = [] }) {
  return [text, content, thinking, ...files.flatMap((file) => [file.name, file.text])];
}

function excerptOf(texts, pattern) {
  for (const text of texts) {
    const place = pattern.exec(text);
    if (!place) continue;
    const [begin, end] = [place.index, place.index + place[0].length];
    const before = text.slice(Math.max(0, begin - BEFORE), begin).toWellFormed();
    return [begin > BEFORE ? `\u2026${before}` : before, place[0], text.slice(end, end + AFTER).toWellFormed()];
  }
  return null;
}
