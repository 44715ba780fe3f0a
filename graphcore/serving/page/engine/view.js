/**
 * Starts the view of the engine at work.
 * @param {HTMLElement} root element that the view fills
 * @param {{get: (path: string) => Promise<any>}} session the connection to the server
 * @returns {{show: () => void, hide: () => void}}
 */
export function startEngineView(root, session) {
  return { show() {}, hide() {} };
}
