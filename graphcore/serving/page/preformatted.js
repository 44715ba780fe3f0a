/** Text shown as it is, in pieces, so that a megabyte of it is laid out only where it is seen. */

const PIECE = 4_000; // characters

/** Grows at its end. */
export class Preformatted {
  #element;
  #piece = null;
  #length = 0;

  /** @param {HTMLElement} element that is filled */
  constructor(element) {
    this.#element = element;
  }

  /** @param {string} text */
  append(text) {
    let rest = text;
    while (rest) {
      if (this.#piece === null || this.#length >= PIECE) this.#begin();
      const end = pieceEnd(rest, PIECE - this.#length);
      this.#piece.appendData(rest.slice(0, end));
      this.#length += end;
      if (rest.length > end) this.#length = PIECE;
      rest = rest.slice(end);
    }
  }

  #begin() {
    const box = document.createElement("span");
    this.#piece = document.createTextNode("");
    box.append(this.#piece);
    this.#element.append(box);
    this.#length = 0;
    if (this.#element.childElementCount === 2) this.#element.classList.add("in-pieces");
  }
}

/** Returns where a piece ends that has room for some characters: after a line if there is one, not inside a pair. */
function pieceEnd(text, room) {
  if (text.length <= room) return text.length;
  const line = text.lastIndexOf("\n", room - 1) + 1;
  if (line > 0) return line;
  const isPair = text.charCodeAt(room - 1) >= 0xd800 && text.charCodeAt(room - 1) <= 0xdbff;
  return isPair ? Math.max(room - 1, 1) : Math.max(room, 1);
}
