//! A listing as an XML document, in the form of WebDAV (RFC 4918, section 14.16), that `object_store` reads.

use std::fmt::Write;

use super::folder_access::{Entry, FileFacts};
use super::resource::Resource;

/// Writes the listing of a folder of the run with this key. Begins with the folder itself. Names have no character that XML
/// would escape.
pub(super) fn multistatus(key: &str, folder: Resource, mut entries: Vec<Entry>) -> String {
    entries.insert(0, Entry { resource: folder, file: None });
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"utf-8\"?>\n<multistatus xmlns=\"DAV:\">\n");
    for Entry { resource, file } in &entries {
        let path = resource.to_path(key);
        let properties = match file {
            Some(FileFacts { bytes, modified }) => {
                let modified = httpdate::fmt_http_date(*modified);
                format!("<getlastmodified>{modified}</getlastmodified><getcontentlength>{bytes}</getcontentlength><resourcetype/>")
            }
            // Every entry needs a time; nobody uses that of a folder.
            None => "<getlastmodified>Thu, 01 Jan 1970 00:00:00 GMT</getlastmodified><resourcetype><collection/></resourcetype>".to_owned(),
        };
        let _ = writeln!(
            out,
            "<response><href>{path}</href><propstat><prop>{properties}</prop><status>HTTP/1.1 200 OK</status></propstat></response>"
        );
    }
    out.push_str("</multistatus>\n");
    out
}
