/** Drawing in turns: whatever is to be drawn, the page draws and listens in between. */

const FRAME_MILLISECONDS = 8; // of one frame
const PAUSE = 4; // times the time that drawing took: at most a fifth of the time is spent on it

const waiting = new Set();
let isAsked = false;

/**
 * Calls a function in one of the next frames; one that waits already is called once.
 * @param {(milliseconds: number) => void} draw is given the time that it may take
 */
export function drawSoon(draw) {
  waiting.add(draw);
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(drawFrame);
}

function drawFrame() {
  const began = performance.now();
  const spent = () => performance.now() - began;
  for (const draw of [...waiting].reverse()) { // the newest is seen first
    waiting.delete(draw);
    draw(Math.max(FRAME_MILLISECONDS - spent(), 1));
    if (spent() > FRAME_MILLISECONDS) break;
  }
  setTimeout(() => {
    isAsked = waiting.size > 0;
    if (isAsked) requestAnimationFrame(drawFrame);
  }, spent() * PAUSE);
}
