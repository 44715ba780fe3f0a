/** The dialog with the settings of a conversation. */

import { shown } from "./dialogs.js";
import { button, make } from "./dom.js";
import { NO_SETTINGS, settingsErrors } from "./settings_values.js";

const TOOLS_HINT = "A JSON list of function definitions, as OpenAI's interface has them. The page shows the calls, and "
  + "you enter what the tools return.";
const SCHEMA_HINT = "A JSON schema that the answer must match. The model can then write nothing else.";
const TOP_P_HINT = "Only the likeliest tokens that have this share of the probability are drawn; 1 is all.";
const MIN_P_HINT = "Only tokens that are at least so likely, as a share of the likeliest one, are drawn; 0 is all.";
const EFFORTS = [
  ["", "The model's default"], ["none", "No thinking"], ["low", "Low"], ["medium", "Medium"], ["high", "High"],
];

/**
 * Shows the settings until they are saved or the dialog is closed.
 * @param {object} settings
 * @param {boolean} isNew true before the conversation has a message
 * @param {Object<string, number>} defaults sampling parameters that the server takes for empty fields, by their names
 * @returns {Promise<{settings: object, isForAll: boolean}|null>} null if nothing is to be saved
 */
export async function editSettings(settings, isNew, defaults) {
  let found = null;
  const fields = settingFields(defaults);
  const forAll = make("input", { type: "checkbox", id: "setting-for-all" });
  const save = (event) => {
    event.preventDefault();
    const values = fields.values();
    if (!fields.complain(settingsErrors(values))) return;
    found = { settings: values, isForAll: forAll.checked };
    dialog.close();
  };
  const reset = () => (fields.fill(NO_SETTINGS), fields.complain({}));
  const dialog = make("dialog", { class: "dialog settings", "aria-labelledby": "settings-title" },
    make("form", { novalidate: true, onsubmit: save },
      make("div", { class: "dialog-head" }, make("h2", { id: "settings-title" }, "Settings"),
        button("Close", () => dialog.close(), { icon: "close" })),
      make("p", { class: "hint" }, `They hold for ${isNew ? "the new" : "this"} conversation. A field that is empty is `
        + "not sent: the server's default applies."),
      make("div", { class: "settings-fields" }, ...fields.elements),
      make("div", { class: "check" }, forAll,
        make("label", { for: forAll.id }, "Use these settings for new conversations, too")),
      make("div", { class: "dialog-end" }, button("Reset to defaults", reset), make("span", { class: "spacer" }),
        button("Cancel", () => dialog.close()), make("button", { type: "submit", class: "main-button" }, "Save"))));
  fields.fill(settings);
  await shown(dialog);
  return found;
}

/** Samplers that few people set, by their names in the settings: label, name for the server, hint. */
const ADVANCED = {
  dryMultiplier: ["DRY multiplier", "dry_multiplier", "Above 0, a token that would continue a repetition becomes less "
    + "likely; 0.8 is usual, 0 is off."],
  dryBase: ["DRY base", "dry_base", "By how much more for each further token of the repetition; below 1, DRY is off."],
  dryAllowedLength: ["DRY allowed length", "dry_allowed_length", "In tokens; shorter repetitions may go on."],
  dryLast: ["DRY looks back", "dry_penalty_last_n", "In tokens of prompt and answer; -1 is all, 0 is off."],
  xtcProbability: ["XTC probability", "xtc_probability", "The share of tokens before which XTC drops the likeliest ones; "
    + "0.5 is usual, 0 is off."],
  xtcThreshold: ["XTC threshold", "xtc_threshold", "The probability from which on tokens may be dropped; above 0.5, XTC "
    + "is off."],
  topNSigma: ["Top n sigma", "top_n_sigma", "Only tokens are drawn whose logit is at most so many standard deviations "
    + "below the highest; 1 is usual, 0 is off."],
};

function settingFields(defaults) {
  const number = (name) => make("input", {
    type: "text", inputmode: "decimal", autocomplete: "off",
    placeholder: defaults[name] === undefined ? null : String(Number(defaults[name].toPrecision(6))),
  });
  const elementsOf = (some) => some.map(({ element }) => element);
  const advanced = Object.entries(ADVANCED).map(([name, [label, field, hint]]) => (
    settingRow(name, label, number(field), hint)));
  const fold = make("details", { class: "settings-advanced" }, make("summary", {}, "Advanced sampling"),
    make("div", { class: "settings-fields" }, ...elementsOf(advanced)));
  const early = [
    settingRow("system", "System prompt", area(4), "Tells the model who it is and how to answer."),
    settingRow("temperature", "Temperature", number("temperature"), "0 always takes the likeliest token."),
    settingRow("topK", "Top k", number("top_k"), "Only so many of the likeliest tokens are drawn; 0 is all."),
    settingRow("topP", "Top p", number("top_p"), TOP_P_HINT),
    settingRow("minP", "Min p", number("min_p"), MIN_P_HINT),
    settingRow("repetition", "Repetition penalty", number("repetition_penalty"), "Above 1, tokens that the text has "
      + "already become less likely; 1 is off."),
    settingRow("presence", "Presence penalty", number("presence_penalty"), "Above 0, tokens that the answer has already "
      + "become less likely; 0 is off."),
    settingRow("frequency", "Frequency penalty", number("frequency_penalty"), "Above 0, tokens become less likely each "
      + "time that the answer has them; 0 is off."),
  ];
  const late = [
    settingRow("maxTokens", "Longest answer", number("max_tokens"), "In tokens."),
    settingRow("seed", "Seed", number("seed"), "The same seed gives the same answer again."),
    settingRow("effort", "Thinking", choice(EFFORTS), "How much a model that can think does so before it answers."),
    settingRow("showsThinking", "Show thinking while it is written", make("input", { type: "checkbox" })),
    settingRow("tools", "Tools", area(5, "mono"), TOOLS_HINT),
    settingRow("schema", "Schema of the answer", area(5, "mono"), SCHEMA_HINT),
  ];
  const rows = [...early, ...advanced, ...late];
  const unfoldFor = (some) => (fold.open ||= some.some(({ name }) => name in ADVANCED));
  return {
    elements: [...elementsOf(early), fold, ...elementsOf(late)],
    values: () => Object.fromEntries(rows.map(({ name, read }) => [name, read()])),
    fill: (settings) => {
      rows.forEach(({ name, write }) => write(settings[name] ?? NO_SETTINGS[name]));
      unfoldFor(rows.filter(({ name }) => settings[name]));
    },
    complain: (errors) => {
      const wrong = rows.filter(({ name, complain }) => complain(errors[name]));
      unfoldFor(wrong);
      wrong[0]?.control.focus();
      return wrong.length === 0;
    },
  };
}

function settingRow(name, label, control, hint = "") {
  control.id = `setting-${name}`;
  const isCheck = control.type === "checkbox";
  const error = make("p", { id: `${control.id}-error`, class: "field-error" });
  const help = hint && make("p", { id: `${control.id}-hint`, class: "hint" }, hint);
  if (!isCheck) control.setAttribute("aria-describedby", `${error.id}${hint ? ` ${control.id}-hint` : ""}`);
  const words = make("label", { for: control.id }, label);
  const element = make("div", { class: isCheck ? "check" : `field field-${name}` },
    ...(isCheck ? [control, words] : [words, control, error, help]));
  return {
    name, control, element,
    read: () => (isCheck ? control.checked : control.value),
    write: (value) => (isCheck ? (control.checked = Boolean(value)) : (control.value = value)),
    complain: (text = "") => {
      error.textContent = text;
      control.toggleAttribute("aria-invalid", text !== "");
      if (text) control.setAttribute("aria-invalid", "true");
      return text !== "";
    },
  };
}

function area(rows, kind = "") {
  return make("textarea", { rows, class: kind, spellcheck: kind ? "false" : null });
}

function choice(options) {
  return make("select", {}, ...options.map(([value, text]) => make("option", { value }, text)));
}
