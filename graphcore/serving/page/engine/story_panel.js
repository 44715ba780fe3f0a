// The sentences at the top, which explain what the engine does.

import { fillChildren, make, setText } from "./elements.js";

/**
 * Returns the sentences' panel.
 * @returns {{element: HTMLElement, update: (told: {lead: string[], details: string[]}) => void}}
 */
export function makeStory() {
  const lead = make("p", { class: "engine-lead" });
  const details = make("div", { class: "engine-note" });
  return {
    element: make("section", { class: "engine-story", "aria-label": "What happens" }, lead, details),
    update(told) {
      setText(lead, told.lead.join(" "));
      fillChildren(details, told.details, () => make("p"), setText);
    },
  };
}
