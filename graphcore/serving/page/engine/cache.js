// The pages of the KV cache: a bar for each pool, by what holds them.

import { fillChildren, make, makeSection, setText } from "./elements.js";
import { makeStackedBar } from "./stacked_bar.js";
import { counted, inPercent } from "./words.js";

const MANY = 16; // sequences from which on they are summed up
const EXPLAINED =
  "The KV cache holds what the model computed for the tokens of each conversation, in pages. A beginning that " +
  "several requests share is computed and kept once.";

/**
 * Returns who holds the pages of a pool.
 * @param {{pages: number, free: number, prefix_only: number, shared: number}} pool
 * @param {object[]} requests `requests` of /status; none if their pages are not those of this pool
 * @returns {import("./stacked_bar.js").BarPart[]}
 */
export function pageParts(pool, requests) {
  const own = pool.pages - pool.free - pool.prefix_only - pool.shared;
  const holding = requests
    .map((one) => ({ name: `Request ${one.id}`, amount: one.pages - one.shared_pages, note: "its own pages" }))
    .filter((one) => one.amount > 0);
  const known = holding.reduce((sum, one) => sum + one.amount, 0);
  const areNamed = holding.length > 0 && holding.length <= MANY && known <= own;
  const parts = areNamed ? holding.map((one, index) => ({ ...one, kind: `part-sequence-${index % 2}` })) : [];
  const others = areNamed ? "Other sequences" : "Sequences";
  const kept = "kept for prompts that begin alike; given up when room is needed";
  return [
    ...parts,
    { kind: "part-others", name: others, amount: own - (areNamed ? known : 0), note: "pages of one sequence alone" },
    { kind: "part-shared", name: "Shared", amount: pool.shared, note: "held by two or more requests" },
    { kind: "part-prefix", name: "Prefix cache", amount: pool.prefix_only, note: kept },
    { kind: "part-unused", name: "Free", amount: pool.free },
  ]
    .filter((part) => part.amount > 0)
    .map((part) => ({ ...part, words: counted(part.amount, "page") }));
}

/**
 * Returns the panel of the KV cache.
 * @returns {{section: HTMLElement, update: (pools: object[], requests: object[]) => void}}
 */
export function makeCache() {
  const list = make("div", { class: "engine-pools" });
  const section = makeSection("panel-cache", "KV cache", make("p", { class: "engine-note", text: EXPLAINED }), list);
  const bars = [];
  const create = () => {
    const title = make("h3");
    const bar = makeStackedBar();
    bars.push({ title, bar });
    return make("div", {}, title, bar.element);
  };
  return {
    section,
    update(pools, requests) {
      section.hidden = pools.length === 0;
      bars.length = Math.min(bars.length, pools.length);
      fillChildren(list, pools, create, (_, pool, index) => {
        const { title, bar } = bars[index];
        const used = inPercent(pool.pages > 0 ? 1 - pool.free / pool.pages : 0);
        const size = counted(pool.page_tokens, "token");
        const words = `${pool.name}: ${used} of ${counted(pool.pages, "page")} in use, ${size} each`;
        setText(title, words);
        bar.update(pageParts(pool, pools.length === 1 ? requests : []), pool.pages, words);
      });
    },
  };
}
