/** What conversation_store.js needs of IndexedDB, in memory, for browsers that keep nothing for the page. */

/** @returns {{transaction: (names: string[]) => object}} an empty database */
export function memoryDatabase() {
  const stores = { conversations: memoryStore(), messages: memoryStore(), drafts: memoryStore() };
  return { transaction: () => happened("oncomplete", { objectStore: (name) => stores[name] }) };
}

function memoryStore() {
  const records = new Map();
  const those = (field, value) => [...records.values()].filter((record) => record[field] === value);
  return {
    get: (id) => answered(records.get(id)),
    getKey: (id) => answered(records.has(id) ? id : undefined),
    getAll: () => answered([...records.values()]),
    put: (record) => answered(records.set(record.id, structuredClone(record)).size),
    delete: (id) => answered(records.delete(id)),
    index: (field) => ({
      getAll: (value) => answered(those(field, value)),
      getAllKeys: (value) => answered(those(field, value).map(({ id }) => id)),
    }),
  };
}

function answered(value) {
  return happened("onsuccess", { result: structuredClone(value) });
}

/** Adds an event that comes as soon as somebody listens. */
function happened(name, target) {
  return Object.defineProperty(target, name, { set: (listener) => queueMicrotask(listener) });
}
