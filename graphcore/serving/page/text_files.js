/** Files of text that become part of a message. */

import { size } from "./number_texts.js";

const LARGEST_BYTES = 8 * 2 ** 20; // of all files of a message: the server's default limit is 16 MiB of JSON
const FENCE = /^ {0,3}(`{3,})/gm;

/**
 * Reads files as UTF-8.
 * @param {Iterable<File>} files
 * @param {number} taken bytes of the files that the message has already
 * @returns {Promise<{read: {name: string, size: number, text: string}[], refused: string[]}>} refused: sentences
 */
export async function readFiles(files, taken) {
  const [read, refused] = [[], []];
  let total = taken;
  for (const file of files) {
    if (total + file.size > LARGEST_BYTES) {
      refused.push(`${file.name} was not added: the files of a message may have ${size(LARGEST_BYTES)} in all.`);
      continue;
    }
    const text = await textOf(file);
    if (text === null) {
      refused.push(`${file.name} was not added: it is no text in UTF-8. Only files of text can be read.`);
    } else {
      read.push({ name: file.name, size: file.size, text });
      total += file.size;
    }
  }
  return { read, refused };
}

async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text.replaceAll(/\r\n?/g, "\n");
  } catch {
    return null; // not UTF-8, or a folder
  }
}

/**
 * Returns the text of a user's message with its files as fenced blocks.
 * @param {{text: string, files: {name: string, text: string}[]}} message
 * @returns {string}
 */
export function withFiles({ text, files }) {
  return [...files.map(fenced), ...(text ? [text] : [])].join("\n\n");
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...Array.from(text.matchAll(FENCE), (found) => found[1].length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}
