"use strict";

// Images of messages: read from files, shown, and made smaller where they are large.

const READ_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/tiff"];
/** A file of more bytes is sent as a JPEG of at most so many pixels a side: every later turn sends it again. */
const LARGE_BYTES = 1 << 20;
const LARGEST_SIDE = 2048;
const JPEG_QUALITY = 0.92;

/** The images of the message that is being written. */
class AttachedImages {
  /** `on.changed()` is called after each change, `on.refused(text)` with what is wrong, or null. */
  constructor(list, on) {
    this.list = list;
    this.on = on;
    /** `data:` URLs. */
    this.urls = [];
    this.isReading = false;
  }

  /** Adds files; those that are no images of a known kind are left out, and said to be. */
  async add(files) {
    const read = files.filter(({ type }) => READ_TYPES.includes(type));
    const { max_per_request: most } = server.images;
    let refused = read.length < files.length ? "Images are PNG, JPEG, WEBP, GIF or TIFF files." : null;
    this.isReading = true;
    this.on.changed();
    try {
      for (const file of read) {
        if (this.urls.length >= most) refused = `A request may have ${most} images.`;
        else this.urls.push(await urlOf(file));
      }
    } catch (error) {
      refused = `The file cannot be read: ${error.message}`;
    }
    this.isReading = false;
    this.on.refused(refused);
    this.show();
  }

  /** Returns the addresses, and forgets them. */
  take() {
    const { urls } = this;
    this.urls = [];
    this.on.refused(null);
    this.show();
    return urls;
  }

  remove(at) {
    this.urls.splice(at, 1);
    this.show();
    prompt.focus();
  }

  show() {
    this.list.hidden = this.urls.length === 0;
    this.list.replaceChildren(
      ...this.urls.map((url, at) => {
        const act = { class: "quiet", type: "button", "aria-label": `Remove image ${at + 1}`, onclick: () => this.remove(at) };
        return el("li", {}, imageElement(url, at), el("button", act, "×"));
      }),
    );
    this.on.changed();
  }
}

/** The images of a turn; null if there are none. */
function imagesElement(urls) {
  if (!urls) return null;
  return el("ul", { class: "images" }, ...urls.map((url, at) => el("li", {}, imageElement(url, at))));
}

/** An image that is here, or the name of one that is elsewhere, which the page does not load. */
function imageElement(url, at) {
  if (url.startsWith("data:")) return el("img", { src: url, alt: `Image ${at + 1}` });
  return el("span", { class: "address" }, url.slice(0, 200));
}

/** The files of a clipboard that may be images. */
function pastedFiles({ files, items }) {
  const isText = [...items].some(({ kind, type }) => kind === "string" && type === "text/plain");
  // Office programs put a picture of the text beside the text.
  return isText ? [] : [...files];
}

async function urlOf(file) {
  if (file.size <= LARGE_BYTES) return dataUrl(file);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    // The server may know the format.
    return dataUrl(file);
  }
  const scale = Math.min(1, LARGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const size = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = Object.assign(document.createElement("canvas"), { width: size[0], height: size[1] });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, ...size);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", JPEG_QUALITY);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
