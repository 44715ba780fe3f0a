/**
 * Settings of a conversation as typed, what is wrong with them, and the fields of a request that they become.
 * A setting that is empty is not sent: the server's default applies.
 */

const STORED = "graphcore.settings";
const MOST = 1000; // of settings that the server does not bound
const EFFORTS = ["none", "low", "medium", "high"];

/** Names and values of a conversation without settings. */
export const NO_SETTINGS = Object.freeze({
  system: "", temperature: "", topK: "", topP: "", minP: "", repetition: "", presence: "", frequency: "",
  dryMultiplier: "", dryBase: "", dryAllowedLength: "", dryLast: "", xtcProbability: "", xtcThreshold: "", topNSigma: "",
  maxTokens: "", seed: "",
  effort: "", showsThinking: false, tools: "", schema: "",
});

/** @returns {object} the settings of new conversations */
export function defaultSettings() {
  try {
    return { ...NO_SETTINGS, ...JSON.parse(localStorage.getItem(STORED) ?? "{}") };
  } catch {
    return { ...NO_SETTINGS };
  }
}

/**
 * Keeps the settings of new conversations.
 * @param {object} settings
 */
export function saveDefaultSettings(settings) {
  try {
    localStorage.setItem(STORED, JSON.stringify(settings));
  } catch {
    // the browser keeps nothing for this page: they last for this conversation
  }
}

/**
 * Returns what is wrong.
 * @param {object} settings
 * @returns {Object<string, string>} a sentence for each wrong setting, by name
 */
export function settingsErrors(settings) {
  const errors = {};
  for (const [name, read] of Object.entries(READERS)) {
    try {
      read(settings[name] ?? "");
    } catch (error) {
      errors[name] = error.message;
    }
  }
  return errors;
}

/**
 * Returns the fields of a request.
 * @param {object} settings without errors
 * @returns {object}
 */
export function settingsFields(settings) {
  const fields = {};
  for (const [name, read] of Object.entries(READERS)) Object.assign(fields, read(settings[name] ?? ""));
  return fields;
}

/**
 * Counts the settings that are not the server's.
 * @param {object} settings
 * @returns {number}
 */
export function countSettings(settings) {
  return Object.keys(NO_SETTINGS).filter((name) => name !== "showsThinking" && settings[name]?.trim()).length;
}

const READERS = {
  temperature: (text) => numberField("temperature", text, 0, 100),
  topK: (text) => wholeField("top_k", text, 0),
  topP: (text) => numberField("top_p", text, 0, 1),
  minP: (text) => numberField("min_p", text, 0, 1),
  repetition: (text) => numberField("repetition_penalty", text, 0.01, 100),
  presence: (text) => numberField("presence_penalty", text, -2, 2),
  frequency: (text) => numberField("frequency_penalty", text, -2, 2),
  dryMultiplier: (text) => numberField("dry_multiplier", text, 0, MOST),
  dryBase: (text) => numberField("dry_base", text, 0, MOST),
  dryAllowedLength: (text) => wholeField("dry_allowed_length", text, 0),
  dryLast: (text) => wholeField("dry_penalty_last_n", text, -1),
  xtcProbability: (text) => numberField("xtc_probability", text, 0, 1),
  xtcThreshold: (text) => numberField("xtc_threshold", text, 0, 1),
  topNSigma: (text) => numberField("top_n_sigma", text, -1, MOST),
  maxTokens: (text) => wholeField("max_tokens", text, 1),
  seed: (text) => wholeField("seed", text, Number.MIN_SAFE_INTEGER),
  effort: (text) => (EFFORTS.includes(text) ? { reasoning_effort: text } : {}),
  tools: toolsField,
  schema: schemaField,
};

function numberField(name, text, least, most) {
  if (!text.trim()) return {};
  const value = Number(text.trim().replace(",", "."));
  if (!(value >= least && value <= most)) throw new Error(`Enter a number from ${least} to ${most}, or nothing.`);
  return { [name]: value };
}

function wholeField(name, text, least) {
  if (!text.trim()) return {};
  const value = Number(text.trim());
  if (Number.isSafeInteger(value) && value >= least) return { [name]: value };
  throw new Error(`Enter a whole number${least >= -1 ? ` from ${least}` : ""}, or nothing.`);
}

function toolsField(text) {
  if (!text.trim()) return {};
  const found = parsed(text);
  if (!Array.isArray(found)) throw new Error("The tools must be a JSON list: [ … ].");
  const tools = found.map((tool) => (tool?.type === "function" ? tool : { type: "function", function: tool }));
  const wrong = tools.findIndex((tool) => typeof tool.function?.name !== "string" || !tool.function.name);
  if (wrong >= 0) throw new Error(`Tool ${wrong + 1} of the list has no function with a name.`);
  return tools.length ? { tools } : {};
}

function schemaField(text) {
  if (!text.trim()) return {};
  const schema = parsed(text);
  if (typeof schema !== "object" || schema === null || Array.isArray(schema)) {
    throw new Error("The schema must be a JSON object: { … }.");
  }
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not valid JSON: ${error.message}.`);
  }
}
