/** Server-sent events of an answer to fetch. */

/**
 * Yields the data of each event.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string>}
 */
export async function* serverEvents(body) {
  let lines = [];
  for await (const line of linesOf(body)) {
    if (line === "") {
      if (lines.length) yield lines.join("\n");
      lines = [];
    } else if (line.startsWith("data:")) {
      lines.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
  if (lines.length) yield lines.join("\n");
}

async function* linesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const whole = rest + value;
      const end = whole.endsWith("\r") ? whole.length - 1 : whole.length; // its \n may come yet
      const lines = whole.slice(0, end).split(/\r\n|\n|\r/);
      rest = lines.pop() + whole.slice(end);
      yield* lines;
    }
    if (rest) yield* rest.split(/\r\n|\n|\r/);
  } finally {
    reader.cancel().catch(() => {}); // the reader has left, or the connection is gone
  }
}
