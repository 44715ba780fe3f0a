/** What is said of an answer: how far it is, what it took, and why it ended. */

import { counted, short, whole } from "./number_texts.js";

/**
 * Returns how far an answer is.
 * @param {object|null} progress see AnswerRun; null for an answer that another tab makes
 * @returns {string}
 */
export function progressText(progress) {
  switch (progress?.phase) {
    case undefined: return "Being answered in another tab";
    case "loading": return "Waiting for the model to be loaded";
    case "sending": return "Sent to the server";
    case "waiting": return `Waiting in the queue, place ${whole(progress.place)}`;
    case "prefill": return prefillText(progress);
    default: return decodeText(progress);
  }
}

/**
 * Returns what a finished answer took.
 * @param {Message} message
 * @returns {string}
 */
export function statisticsText({ statistics }) {
  if (statistics === null) return "";
  const { promptTokens, cachedTokens, newTokens, tokensPerSecond, firstTokenSeconds } = statistics;
  const cached = cachedTokens ? ` (${whole(cachedTokens)} from the cache)` : "";
  return joined(
    promptTokens === null ? "" : `Prompt ${counted(promptTokens, "token")}${cached}`,
    newTokens ? `Answer ${counted(newTokens, "token")}` : "",
    rateText(tokensPerSecond),
    firstTokenSeconds === null ? "" : `first token after ${short(firstTokenSeconds)} s`,
  );
}

/**
 * Returns why an answer ended early.
 * @param {Message} message
 * @returns {string} "" for one that is complete
 */
export function endText({ state, statistics, content, toolCalls }) {
  if (state === "stopped") return "Stopped.";
  if (state === "interrupted") return "Interrupted: the page was closed or loaded again.";
  if (state === "done" && statistics?.finishReason === "length") {
    return "Cut at the longest answer allowed, or at the end of the model's context.";
  }
  if (state === "done" && statistics?.finishReason === "repetition") {
    return "Cut, because it repeated itself for 200 tokens. Ask for another answer, or raise the temperature or the "
      + "repetition penalty.";
  }
  return state === "done" && !content && toolCalls.length === 0 ? "The model has ended its answer without a text." : "";
}

/**
 * Returns whether an answer can be continued where it ended.
 * @param {Message} message
 * @returns {boolean}
 */
export function canContinue(message) {
  const isCut = message.state === "done"
    ? ["length", "repetition"].includes(message.statistics?.finishReason)
    : message.state !== "running";
  return isCut && message.content !== "" && message.toolCalls.length === 0;
}

function prefillText({ computed, promptTokens }) {
  return `Reading the prompt: ${whole(computed)} of ${counted(promptTokens, "token")}`;
}

function decodeText({ newTokens, tokensPerSecond }) {
  if (newTokens === null) return "Writing the answer";
  return joined(counted(newTokens, "token"), rateText(tokensPerSecond));
}

function rateText(tokensPerSecond) {
  return tokensPerSecond === null ? "" : `${short(tokensPerSecond)} tokens/s`;
}

function joined(...texts) {
  return texts.filter((text) => text !== "").join(" \u00b7 ");
}
