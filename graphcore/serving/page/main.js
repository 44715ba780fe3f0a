/** Starts the page: the connection, the two views, and the chat. */

import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { ConversationList } from "./conversation_list.js";
import { ConversationStore } from "./conversation_store.js";
import { button, icon } from "./dom.js";
import { startEngineView } from "./engine/view.js";
import { HealthWatch } from "./health_watch.js";
import { MessagesView } from "./messages_view.js";
import { Session } from "./session.js";
import { editSettings } from "./settings_dialog.js";
import { countSettings } from "./settings_values.js";
import { startTheme } from "./theme.js";

const byId = (id) => document.getElementById(id);
const NOTICES = {
  loading: "The model is being loaded. You can write already: a message that you send waits until the model is ready.",
  rebuilding: "The engine has failed and is being loaded again. The page goes on by itself.",
  stalled: "A step takes very long: a disk or a device may not answer. Answers go on if it does.",
  failed: "The engine has failed. The person who started the server finds the reason in its log.",
  draining: "The server is shutting down and takes no new messages.",
  unreachable: "The server cannot be reached. The page tries again by itself; what you have written is kept.",
};

const NOT_KEPT = "This browser keeps no data for this page: conversations last until it is closed or loaded again.";

/** Shows what the server is doing: the model's name, its state, and a notice if something is not as it should be. */
function watchServer(session, health, store, composer) {
  let keptText = store.isKept ? "" : NOT_KEPT;
  const draw = () => {
    byId("model-state").textContent = health.state;
    byId("model-state").dataset.state = health.state;
    byId("notice").replaceChildren(...noticeParts(health, session, keptText));
  };
  const name = async () => {
    if (health.state !== "ready") return;
    const { data } = await session.get("v1/models").catch(() => ({ data: [] })); // the notice says what is wrong
    if (data.length === 0) return;
    byId("model-name").textContent = data[0].id;
    document.title = `${data[0].id} \u2013 graphcore`;
    composer.setContext(data[0].max_model_len ?? null);
  };
  health.addEventListener("state", () => (draw(), name()));
  session.addEventListener("key", () => (draw(), session.needsKey || name()));
  store.addEventListener("failed", ({ detail }) => ((keptText = notKept(detail)), draw()));
  draw();
}

function noticeParts(health, session, keptText) {
  if (NOTICES[health.state]) return [NOTICES[health.state]];
  if (session.needsKey) return ["This server needs a key. ", button("Enter the key", () => session.enterKey())];
  return keptText ? [keptText] : [];
}

function notKept(error) {
  const reason = error?.message || "there is no room";
  return `This conversation cannot be kept in the browser (${reason}). Copy what you need before you close the page.`;
}

/** Shows the view that the address names: #chat, #chat/ID of a conversation, or #engine. */
function watchAddress(chat, engine) {
  let isEngine = false;
  const go = async () => {
    const [view, id] = location.hash.slice(1).split("/");
    const wasEngine = isEngine;
    isEngine = view === "engine";
    byId("engine").hidden = !isEngine;
    byId("chat").hidden = isEngine;
    for (const [link, isShown] of [["engine-link", isEngine], ["chat-link", !isEngine]]) {
      if (isShown) byId(link).setAttribute("aria-current", "page");
      else byId(link).removeAttribute("aria-current");
    }
    if (isEngine) engine.show();
    else if (wasEngine) engine.hide();
    if (!isEngine) await openNamed(chat, id);
  };
  window.addEventListener("hashchange", go);
  chat.addEventListener("begun", () => history.replaceState(null, "", `#chat/${chat.conversation.id}`));
  chat.addEventListener("gone", () => (location.hash = "#chat"));
  chat.addEventListener("change", () => {
    byId("chat-link").hash = chat.conversation ? `#chat/${chat.conversation.id}` : "#chat";
  });
  return go();
}

async function openNamed(chat, id) {
  const isOpen = chat.isOpened && (chat.conversation?.id ?? "") === (id ?? "");
  if (!isOpen && !(await chat.open(id || null))) location.hash = "#chat";
}

/** Shows the name of the conversation, and its settings. */
function startHead(chat, session) {
  const title = byId("conversation-title");
  const open = byId("settings-button");
  chat.addEventListener("change", () => {
    title.textContent = chat.conversation?.title ?? "New conversation";
    const count = countSettings(chat.settings);
    open.replaceChildren(icon("settings"), count ? `Settings (${count} set)` : "Settings");
  });
  open.addEventListener("click", async () => {
    const status = await session.get("status?events=0").catch(() => ({})); // while it loads, fields stay empty
    const found = await editSettings(chat.settings, !chat.conversation, status.sampling ?? {});
    if (found) await chat.saveSettings(found.settings, found.isForAll);
  });
}

async function start() {
  startTheme(byId("theme-button"));
  const [session, health, store] = [new Session(), new HealthWatch(), await ConversationStore.open()];
  const chat = new Chat({ session, health, store });
  startHead(chat, session);
  new MessagesView(chat, byId("messages"), byId("newest-button"));
  const composer = new Composer(byId("composer"), byId("chat"), chat, store);
  chat.addEventListener("begun", () => composer.begun(chat.conversation.id));
  watchServer(session, health, store, composer);
  await new ConversationList(byId("conversations"), byId("conversations-button"), chat, store).draw();
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) chat.stop();
  });
  health.start();
  await watchAddress(chat, startEngineView(byId("engine"), session));
}

start();
