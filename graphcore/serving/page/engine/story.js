// Sentences that explain what the engine does with this model on this machine, with its own numbers.

import { groupName, layersOf, numLayersAt, sumBytes } from "./groups.js";
import { counted, inBytes, inPercent, inRate, inTime, listed } from "./words.js";

/**
 * Returns the explanation: the first sentences say what happens, the others add details.
 * @param {object} plan answer of /plan
 * @param {object | null} streaming `streaming` of /status
 * @returns {{lead: string[], details: string[]}}
 */
export function story(plan, streaming) {
  if (!plan.is_streaming) return { lead: residentStory(plan), details: [] };
  const details = [expertStory(plan, streaming), gatherStory(plan), sharingStory(plan)];
  const lead = [sizeStory(plan), ...placeStory(plan), costStory(plan)];
  return { lead: lead.filter(Boolean), details: details.filter(Boolean) };
}

function residentStory(plan) {
  const whole = `All weights of this model, ${inBytes(sumBytes(plan.groups))}, are in ${memoryName(plan)}.`;
  return [whole, "Nothing is read from the disk while it answers."];
}

function memoryName(plan) {
  return isOnGpu(plan) ? "the GPU's memory" : "memory";
}

function isOnGpu(plan) {
  return plan.device.startsWith("cuda");
}

function sizeStory(plan) {
  const size = `The weights are ${inBytes(sumBytes(plan.groups))}`;
  if (plan.budget_bytes === null) return `${size}.`;
  return `${size}; this ${isOnGpu(plan) ? "GPU" : "machine"} may use ${inBytes(plan.budget_bytes)}.`;
}

function placeStory(plan) {
  const streamed = plan.groups.filter((group) => group.place === "streamed");
  if (streamed.length === 0) return [`All ${counted(plan.num_layers, "layer")} stay in ${memoryName(plan)}.`];
  const kept = numLayersAt(plan.groups, "resident");
  const moved = numLayersAt(plan.groups, "streamed");
  const before =
    kept === 0 ? `None of the ${plan.num_layers} layers stays in ${memoryName(plan)}.`
    : moved === 0 ? `All ${plan.num_layers} layers stay in ${memoryName(plan)}.`
    : `${kept} of ${plan.num_layers} layers ${kept === 1 ? "stays" : "stay"} in ${memoryName(plan)}.`;
  const rest = streamed.filter((group) => layersOf(group) === null).map((group) => `the ${groupName(group)}`);
  const layers = kept === 0 ? "they" : `the other ${moved === 1 ? "layer" : moved}`;
  const subject = listed(moved === 0 ? rest : [layers, ...rest]);
  const isOne = moved + rest.length === 1;
  return [before, `${subject[0].toUpperCase()}${subject.slice(1)} ${isOne ? "is" : "are"} ${wayStory(plan)}`];
}

function wayStory(plan) {
  const { source, slots, mode } = plan.streaming;
  const from =
    source === "host" && isOnGpu(plan) ? "copied from RAM to the GPU"
    : source === "host" ? "copied from another place in RAM"
    : isOnGpu(plan) ? "read from the disk to the GPU"
    : "read from the disk";
  const again = `${from} again for every token (and for every pass over a prompt), through ${counted(slots, "slot")}`;
  if (slots < 2 || mode === "sync") return `${again}: each part is fetched when it is needed, and then computed with.`;
  return `${again}: while one group of layers computes, the next is read.`;
}

function costStory(plan) {
  const bytes = plan.streaming.expected_bytes_per_token;
  if (!bytes) return "";
  const moves = `One token therefore moves ${inBytes(bytes)}`;
  const rate = plan.link_bytes_per_second;
  return rate ? `${moves}; at the measured ${inRate(rate)} that takes ${inTime(bytes / rate)}.` : `${moves}.`;
}

function expertStory(plan, streaming) {
  const { expert_slots: slots, mapped_layers: mapped, expert_hit_rate: expected } = plan.streaming;
  const groups = plan.groups.filter((group) => group.place === "cached" || group.place === "mapped");
  const bytes = inBytes(sumBytes(groups));
  if (groups.some((group) => group.place === "mapped")) {
    const wait = `The experts of ${counted(mapped, "layer")} (${bytes}) wait in RAM`;
    return `${wait}, where the GPU reads those that a token needs, each time.`;
  }
  if (groups.length === 0) return "";
  const fit = `${counted(slots, "expert")} fit in ${memoryName(plan)} at a time, and missing ones are fetched`;
  const room = `A token needs only a few experts of each layer. All of them are ${bytes}; ${fit}.`;
  const measured = streaming?.expert_hit_rate ?? null;
  if (measured !== null) return `${room} So far ${inPercent(measured)} of those needed were there already.`;
  return expected === null ? room : `${room} About ${inPercent(expected)} of those needed should be there already.`;
}

function gatherStory(plan) {
  const tables = plan.groups.filter((group) => group.place === "gathered");
  if (tables.length === 0) return "";
  const names = listed(tables.map((group) => `the ${groupName(group)} (${inBytes(group.bytes)})`));
  return `Of ${names} only the rows of the tokens in use are fetched.`;
}

function sharingStory(plan) {
  return plan.streaming.groups > 0 ? "Requests that run at the same time share each pass over the weights." : "";
}
