// What the pages do beyond HTML; every page can be read, and every form sent, without it.
"use strict";
(() => {
  // `/` leads to the search of a page, Escape out of it.
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select, [contenteditable]");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      const field = document.querySelector("[type=search]");
      if (field) { event.preventDefault(); field.focus(); field.select(); }
    }
    if (event.key === "Escape" && typing && typing.type === "search") typing.blur();
  });
  // A change that cannot be taken back is asked for twice.
  document.addEventListener("submit", (event) => {
    const words = event.target.dataset.sure;
    if (words && !window.confirm(words)) { event.preventDefault(); event.stopImmediatePropagation(); }
  }, true);
  // Logs stay at their end while a reader is there, and stand still while somebody reads further up or has paused them.
  const follows = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  document.addEventListener("htmx:beforeSwap", (event) => {
    document.querySelectorAll("[data-follow]").forEach((box) => { box.dataset.atEnd = follows(box) ? "yes" : ""; });
  });
  const settle = () => document.querySelectorAll("[data-follow][data-at-end=yes]").forEach((box) => { box.scrollTop = box.scrollHeight; });
  document.addEventListener("htmx:afterSettle", settle);
  document.addEventListener("htmx:sseMessage", settle);
  document.querySelectorAll("[data-follow]").forEach((box) => { box.scrollTop = box.scrollHeight; box.dataset.atEnd = "yes"; });
  // A log that is paused asks for nothing; what came meanwhile is there when it goes on.
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-pause]");
    if (!button) return;
    const box = button.closest(".log-box"), paused = box.toggleAttribute("data-paused");
    button.textContent = paused ? "Go on" : "Pause";
    button.setAttribute("aria-pressed", String(paused));
  });
  document.addEventListener("htmx:beforeRequest", (event) => { if (event.target.closest("[data-paused]")) event.preventDefault(); });
  // A page holds the end of a long log, not all of it.
  document.addEventListener("htmx:afterSettle", () => document.querySelectorAll("pre.log[data-follow]").forEach((box) => {
    while (box.children.length > 40) box.firstElementChild.remove();
  }));
  // A file may be dropped on a form that takes one.
  document.querySelectorAll("[data-drop]").forEach((form) => {
    const mark = (over) => (event) => { event.preventDefault(); form.classList.toggle("over", over); };
    form.addEventListener("dragover", mark(true));
    form.addEventListener("dragleave", mark(false));
    form.addEventListener("drop", (event) => {
      mark(false)(event);
      if (event.dataTransfer.files.length) form.querySelector("[type=file]").files = event.dataTransfer.files;
    });
  });
  // A server that does not answer any more is told of once; when it does again, the next look takes the words away.
  const gone = (event) => {
    let words = document.getElementById("gone");
    if (event.type === "htmx:afterRequest") { if (event.detail.xhr.status > 0 && words) words.remove(); return; }
    if (words) return;
    words = document.createElement("p");
    words.id = "gone"; words.className = "notice bad"; words.setAttribute("role", "alert");
    words.textContent = "The console does not answer. What is shown may be old: start it again, and load this page.";
    document.getElementById("main").prepend(words);
  };
  document.addEventListener("htmx:sendError", gone);
  document.addEventListener("htmx:afterRequest", gone);
  // Buttons that only a script can serve are there only where there is one.
  document.documentElement.classList.add("scripted");
})();
