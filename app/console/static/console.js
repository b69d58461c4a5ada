// htmx loads tables again every few seconds. They stay scrolled to where the reader left them.
const tables = () => document.querySelectorAll(".scroll[id]");
const places = new Map();
document.addEventListener("htmx:beforeSwap", () => tables().forEach((table) => places.set(table.id, table.scrollLeft)));
document.addEventListener("htmx:afterSwap", () => tables().forEach((table) => { table.scrollLeft = places.get(table.id) ?? 0; }));
