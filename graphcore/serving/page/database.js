/** Records kept in the browser (IndexedDB), or in memory where the browser keeps none. */

const NAME = "graphcore";
const VERSION = 1;

/**
 * Opens the database.
 * @returns {Promise<IDBDatabase|null>} null where the browser keeps none
 */
export function openDatabase() {
  return new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open(NAME, VERSION);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = () => {
      const database = request.result;
      database.createObjectStore("conversations", { keyPath: "id" });
      database.createObjectStore("messages", { keyPath: "id" }).createIndex("conversationId", "conversationId");
      database.createObjectStore("drafts", { keyPath: "id" });
    };
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onerror = request.onblocked = () => resolve(null);
  });
}

/**
 * Returns the result of a request.
 * @param {IDBRequest} request
 * @returns {Promise<any>}
 */
export function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/**
 * Waits until a transaction is kept.
 * @param {IDBTransaction} transaction
 * @returns {Promise<void>}
 */
export function kept(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}
