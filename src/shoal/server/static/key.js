// The API key: asked for where the server wants one, kept for this tab only.

const STORAGE = "shoal-api-key";
const form = document.getElementById("key-form");
const input = document.getElementById("key");
const note = document.getElementById("key-note");

/** Whether the server wants a key and none has been given. */
export function isMissing() {
  return document.documentElement.dataset.apiKey === "required" && !sessionStorage.getItem(STORAGE);
}

/** The headers that prove the key. */
export function authorization() {
  const key = sessionStorage.getItem(STORAGE);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Forget the key, which the server has refused. */
export function refuse() {
  sessionStorage.removeItem(STORAGE);
  note.textContent = "The server does not accept this key.";
}

/** Ask for the key, once; `onKey` is called when it has been given. */
export function ask(onKey) {
  if (!form.hidden) return;
  form.hidden = false;
  input.value = "";
  input.focus();
  form.addEventListener(
    "submit",
    (event) => {
      event.preventDefault();
      sessionStorage.setItem(STORAGE, input.value);
      form.hidden = true;
      onKey();
    },
    { once: true },
  );
}
